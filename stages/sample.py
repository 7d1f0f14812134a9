"""The sample stage: one token for each request whose last known token was computed."""

from __future__ import annotations

import numpy as np
import torch

from .errors import RequestFailed
from .io import GrammarOutput, LogprobsLists
from .records import Batch, ExecuteModelState, IntArray, PreparedInputs, PromptSpan, SamplerOutput
from .sampling.choose import choose_tokens
from .sampling.columns import Feature, SamplingColumns
from .sampling.edits import edit_logits
from .sampling.grammar import match_grammar
from .sampling.logprobs import gather_logprobs, to_lists_sync
from .sampling.step import SamplingStep, TokenHistory, to_device

_NOTHING_LEFT = (
    "no token is left to sample: every logit is -inf once grammar, allowed_token_ids, bad_words, min_tokens and "
    "logit_bias are applied"
)


class Sample:
    """Chooses tokens from logits, which it never writes: a step that failed here can be sampled again.

    Greedy requests take the likeliest token after masks, bias and penalties. The others draw one after temperature,
    min_p, top_k and top_p; what they draw depends on their seed and position only. Log probabilities are raw: those of
    the logits before anything was done to them.
    """

    def __init__(self, columns: SamplingColumns, table: TokenHistory) -> None:
        self._columns = columns
        self._table = table

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """Sample.

        Raises:
            InvalidGrammarOutput: grammar masks that fit neither batch nor vocabulary.
        """
        matched = match_grammar(grammar, batch, inputs, state.logits.shape[1])
        prompt_logprobs = tuple(self._score_prompt(batch, span, state.logits) for span in inputs.prompt_spans)
        rows = batch.rows[inputs.sampling_reqs]
        if not len(rows):
            nothing = torch.empty(0, dtype=torch.int64, device=state.logits.device)
            return SamplerOutput(nothing, prompt_logprobs=prompt_logprobs)
        step = SamplingStep.gather(self._columns, self._table, rows)
        raw = _select(state.logits, inputs.sampling_logits)
        edited = edit_logits(raw, step, self._columns, self._table, matched)
        peaks = edited.amax(dim=1)
        tokens = choose_tokens(edited, peaks, step)
        num_nans = _nans_sync(raw, peaks if edited is raw else raw.amax(dim=1))
        failures = _failures_sync(num_nans, peaks)
        logprobs, logprobs_reqs = _logprobs_sync(raw, tokens, step)
        return SamplerOutput(
            tokens,
            failed={
                position: RequestFailed(batch.req_ids[int(inputs.sampling_reqs[position])], reason)
                for position, reason in failures.items()
            },
            num_nans=num_nans,
            logprobs=logprobs,
            logprobs_reqs=logprobs_reqs,
            prompt_logprobs=prompt_logprobs,
        )

    def _score_prompt(self, batch: Batch, span: PromptSpan, logits: torch.Tensor) -> LogprobsLists:
        """Log probabilities of the prompt tokens that really follow each position of a span."""
        row = int(batch.rows[span.batch_index])
        following = self._table.token_ids[row, span.position + 1 : span.position + 1 + span.num_positions]
        num_logprobs = max(int(self._columns.rows[row]["num_prompt_logprobs"]), 0)
        scored = logits[span.first_logit : span.first_logit + span.num_positions]
        tensors = gather_logprobs(scored, following.to(scored.device, torch.int64), num_logprobs)
        return to_lists_sync(tensors, np.full(span.num_positions, num_logprobs))


def _select(logits: torch.Tensor, indices: IntArray) -> torch.Tensor:
    """Logits rows ``indices``; a view when they are the first rows in order, as in every decode step."""
    if indices[-1] == len(indices) - 1 and np.array_equal(indices, np.arange(len(indices))):
        return logits[: len(indices)]
    return logits.index_select(0, to_device(indices, logits.device))


def _nans_sync(logits: torch.Tensor, peaks: torch.Tensor) -> dict[int, int]:
    """How many NaN each row of raw logits holds, for rows that hold any; a row's maximum is NaN then."""
    is_nan = np.isnan(peaks.cpu().numpy())
    return {position: int(logits[position].isnan().sum()) for position in np.flatnonzero(is_nan).tolist()}


def _failures_sync(num_nans: dict[int, int], peaks: torch.Tensor) -> dict[int, str]:
    """Why nothing can be sampled from some rows; ``peaks`` ``[n]`` are the maxima of the edited logits."""
    is_empty = np.isneginf(peaks.cpu().numpy())
    reasons = dict.fromkeys(np.flatnonzero(is_empty).tolist(), _NOTHING_LEFT)
    return reasons | {position: f"the model gave {count} NaN among its logits" for position, count in num_nans.items()}


def _logprobs_sync(
    logits: torch.Tensor, tokens: torch.Tensor, step: SamplingStep
) -> tuple[LogprobsLists | None, IntArray | None]:
    """Log probabilities of sampled tokens under raw logits, and the positions of the requests that asked for them."""
    if not step.uses(Feature.LOGPROBS):
        return None, None
    positions = step.positions_with(Feature.LOGPROBS)
    num_logprobs = step.params["num_logprobs"][positions]
    index = to_device(positions, logits.device)
    tensors = gather_logprobs(logits[index], tokens[index], int(num_logprobs.max()))
    return to_lists_sync(tensors, num_logprobs), positions
