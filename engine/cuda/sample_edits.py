"""What requests change their logits by, on a GPU: lists are uploaded when a parameter changes, masks step by step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from ...stages.records import IntArray
from ...stages.sampling.columns import DEFAULT_ROW, LOGIT_EDITS, Feature, SamplingColumns
from ...stages.sampling.grammar import GrammarRows
from ...stages.sampling.step import SamplingStep, TokenHistory, to_device
from ..kernels.logit_edits import EDIT_FIELDS, EditLists, GrammarMasks, KnownTokens, edit_logits
from ..kernels.logits_rows import EditedRows, LogitsRows

_LOGIT_EDITS = int(LOGIT_EDITS)
_FIELD = {name: index for index, name in enumerate(EDIT_FIELDS)}
_LARGEST_INT32 = 2**31 - 1
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@frozen(eq=False)
class _Uploaded:
    """Lists on the device, and what they were made for: parameters, features in use, positions with a grammar."""

    params: npt.NDArray[np.void]
    flags: IntArray
    constrained: IntArray
    lists: EditLists
    mask_index: torch.Tensor
    penalised: IntArray

    def serves(self, step: SamplingStep, constrained: IntArray) -> bool:
        """Whether they hold for a step."""
        return (
            self.params is step.params
            and np.array_equal(self.flags, step.flags)
            and np.array_equal(self.constrained, constrained)
        )


class LogitEdits:
    """Edits logits as :func:`~twostroke.stages.sampling.edits.edit_logits` does, in one pass and without waiting.

    Known tokens are read where the device has them, also those that the host has not seen yet. How often each occurs
    is counted anew in every step: there is nothing to keep right when a request moves, is preempted or rewound.
    """

    def __init__(self, columns: SamplingColumns, table: TokenHistory, device: torch.device) -> None:
        self._columns = columns
        self._table = table
        self._device = device
        self._uploaded: _Uploaded | None = None
        self._counts: torch.Tensor | None = None

    def edit(
        self, source: LogitsRows, lengths: torch.Tensor, step: SamplingStep, grammar: GrammarRows | None
    ) -> EditedRows | None:
        """The logits of the requests that change theirs; None if none does.

        Args:
            source: the step's raw logits.
            lengths: int32 ``[num_rows]``, known tokens of each request of the step.
            step: the requests and what they use.
            grammar: masks of this step.
        """
        if grammar is None and not step.active & _LOGIT_EDITS:
            return None
        constrained = np.empty(0, dtype=np.int64) if grammar is None else grammar.positions.numpy()
        uploaded = self._uploaded
        if uploaded is None or not uploaded.serves(step, constrained):
            uploaded = self._uploaded = self._upload(step, constrained)
        masks = None
        if grammar is not None:
            masks = GrammarMasks(to_device(grammar.bitmask.numpy(), self._device), uploaded.mask_index)
        penalised = uploaded.penalised
        longest = int(step.num_tokens[penalised].max()) if len(penalised) else 0
        known = KnownTokens(self._table.token_ids, lengths, longest)
        # Taken out while kernels are launched: if that fails in between, counts are left that must not be met again.
        counts, self._counts = self._room_for(len(penalised)), None
        edited = edit_logits(source, uploaded.lists, known, counts if len(penalised) else None, masks)
        self._counts = counts
        return edited

    def warm_up(self, source: LogitsRows, lengths: torch.Tensor) -> list[EditedRows]:
        """Compile the kernels; what they gave.

        Args:
            source: any logits.
            lengths: int32 ``[num_rows]``, at least 1 each.
        """
        vocab, count = self._columns.vocab_size, len(lengths)
        zeros = np.zeros(count, dtype=np.int64)
        nobody = SamplingStep(np.arange(count), np.full(count, DEFAULT_ROW), zeros, 0, zeros, zeros)
        counts = torch.zeros(1, vocab, dtype=torch.int32, device=self._device)
        constrained = np.zeros(1, dtype=np.int64)
        uploaded = self._upload(nobody, constrained)
        masks = to_device(np.zeros((1, -(-vocab // 32)), dtype=np.int32), self._device)
        known = KnownTokens(self._table.token_ids, lengths, 1)
        return [
            edit_logits(source, uploaded.lists, known, held, grammar)
            for held in (None, counts)
            for grammar in (None, GrammarMasks(masks, uploaded.mask_index))
        ]

    def _room_for(self, num_counted: int) -> torch.Tensor | None:
        """Counts of tokens, all zero, for at least so many requests."""
        counts = self._counts
        if num_counted and (counts is None or len(counts) < num_counted):
            num_rows = min(1 << (num_counted - 1).bit_length(), len(self._columns.rows))
            counts = torch.zeros(num_rows, self._columns.vocab_size, dtype=torch.int32, device=self._device)
        return counts

    def _upload(self, step: SamplingStep, constrained: IntArray) -> _Uploaded:
        positions = np.union1d(np.flatnonzero(step.flags & _LOGIT_EDITS), constrained)
        requests = np.zeros((len(positions), len(EDIT_FIELDS)), dtype=np.int32)
        for name, values in (
            ("position", positions),
            ("table_row", step.rows[positions]),
            ("num_prompt_tokens", step.num_prompt_tokens[positions]),
            ("min_tokens", np.minimum(step.params["min_tokens"][positions], _LARGEST_INT32)),
            ("allowed_mask", -1),
            ("count_slot", -1),
        ):
            requests[:, _FIELD[name]] = values
        penalties = np.zeros((3, len(positions)), dtype=np.float32)
        penalties[0] = 1
        is_penalised = step.flags[positions] & int(Feature.PENALTIES) != 0
        requests[is_penalised, _FIELD["count_slot"]] = np.arange(is_penalised.sum())
        for index, name in enumerate(_PENALTIES):
            penalties[index, is_penalised] = step.params[name][positions[is_penalised]]
        items, allowed = self._lists_of(step, positions, requests)
        slots = np.full(len(step.rows), -1, dtype=np.int32)
        slots[positions] = np.arange(len(positions))
        mask_index = np.full(len(positions), -1, dtype=np.int32)
        mask_index[np.searchsorted(positions, constrained)] = np.arange(len(constrained))
        lists = EditLists(*(to_device(array, self._device) for array in (requests, items, allowed, penalties, slots)))
        mask_rows = to_device(mask_index, self._device)
        return _Uploaded(step.params, step.flags, constrained, lists, mask_rows, positions[is_penalised])

    def _lists_of(
        self, step: SamplingStep, positions: IntArray, requests: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Items and masks of allowed tokens; where each request's lie is written into ``requests``."""
        items: list[npt.NDArray[np.int32]] = []
        masks: list[npt.NDArray[np.int32]] = []
        num_items = 0

        def put(index: int, name: str, count: str, length: int, *parts: torch.Tensor) -> None:
            nonlocal num_items
            requests[index, _FIELD[name]], requests[index, _FIELD[count]] = num_items, length
            for part in parts:
                values = part.numpy()
                items.append(values.view(np.int32) if values.dtype == np.float32 else values.astype(np.int32).ravel())
                num_items += part.numel()

        for index, position in enumerate(positions.tolist()):
            lists, flags = self._columns.lists.get(int(step.rows[position])), Feature(int(step.flags[position]))
            if lists is None:
                continue
            if Feature.ALLOWED_TOKENS in flags:
                requests[index, _FIELD["allowed_mask"]] = len(masks)
                masks.append(_bits(lists.allowed_ids.numpy(), self._columns.vocab_size))
            if Feature.LOGIT_BIAS in flags:
                put(index, "first_bias", "num_biases", len(lists.bias_ids), lists.bias_ids, lists.biases)
            if Feature.BAD_WORDS in flags:
                requests[index, _FIELD["word_width"]] = lists.bad_words.shape[1]
                put(index, "first_word", "num_words", len(lists.bad_words), lists.bad_words)
            if Feature.MIN_TOKENS in flags:
                put(index, "first_end_id", "num_end_ids", len(lists.end_ids), lists.end_ids)
        none = np.zeros(1, dtype=np.int32)
        return np.concatenate(items or [none]), np.stack(masks or [none])


def _bits(token_ids: IntArray, vocab_size: int) -> npt.NDArray[np.int32]:
    """A mask with the bits of these tokens, int32 ``[ceil(vocab / 32)]``."""
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    is_allowed[token_ids] = True
    return np.packbits(is_allowed, bitorder="little").view(np.int32)
