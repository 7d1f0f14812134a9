"""Reads lists of numbers that a scheduler sent; what is not what it should be is refused by the request's name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import InvalidSchedulerOutput
from .io import BlockIds, NewRequestData
from .records import IntArray
from .request_table import TokenArray
from .sampling_params import SamplingParams
from .specs import NULL_BLOCK


def read_integers(name: str, values: Sequence[int], req_id: str | None = None) -> IntArray:
    """An int64 array of its own of a flat list of integers: nothing is rounded, nothing wraps."""
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths
        array = np.empty(())
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidSchedulerOutput(f"{name} must be a list of integers, got {values!r:.80}", req_id=req_id)
    return array.astype(np.int64, copy=False)


def read_tokens(name: str, tokens: Sequence[int], vocab_size: int, req_id: str) -> TokenArray:
    """Token ids of a vocabulary."""
    array = read_integers(name, tokens, req_id)
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        bad = array[(array < 0) | (array >= vocab_size)][0]
        raise InvalidSchedulerOutput(f"{name} holds {bad}, outside the vocabulary of {vocab_size}", req_id=req_id)
    return array.astype(np.int32)


def check_blocks(block_ids: BlockIds, num_groups: int, num_blocks: int, req_id: str) -> None:
    """Block ids for each KV-cache group, all in the pool (``num_blocks`` counts the null block), none twice."""
    shown = len(block_ids) if hasattr(block_ids, "__len__") else f"{block_ids!r:.40}"
    if shown != num_groups:
        raise InvalidSchedulerOutput(
            f"has block ids for {shown} KV-cache groups, the runner has {num_groups}", req_id=req_id
        )
    for ids in block_ids:
        if not hasattr(ids, "__len__"):
            raise InvalidSchedulerOutput(
                f"block ids must be a list for each group, got {block_ids!r:.80}", req_id=req_id
            )
        for block in ids:  # mostly one: an array would take longer to make than to check
            if type(block) is not int and not isinstance(block, np.integer):
                raise InvalidSchedulerOutput(f"block ids must be integers, got {block!r:.80}", req_id=req_id)
            if not NULL_BLOCK < block < num_blocks:
                raise InvalidSchedulerOutput(f"block {block} is not in the pool of 1 … {num_blocks - 1}", req_id=req_id)
        if len(ids) > 1 and len(set(ids)) < len(ids):
            raise InvalidSchedulerOutput(f"a block is listed twice in {ids!r:.80}", req_id=req_id)


class WrittenBlocks:
    """Who writes which blocks in a step: keys and values of two requests in one block spoil each other."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, int], str] = {}

    def add(self, req_id: str, group: int, block_ids: Sequence[int]) -> None:
        """A request is given blocks of a KV-cache group to write to.

        Raises:
            InvalidSchedulerOutput: another request is given one of them, too.
        """
        for block in block_ids:
            writer = self._writers.setdefault((group, int(block)), req_id)
            if writer != req_id:
                raise InvalidSchedulerOutput(
                    f"is given block {block} to write to, and so is {writer!r}; requests share only blocks that are "
                    "computed already",
                    req_id=req_id,
                )


def read_one_block_each(block_ids: Sequence[BlockIds], num_groups: int, num_blocks: int) -> IntArray | None:
    """Block ids of requests that get one block of each group, int64 ``[len(block_ids), num_groups]``.

    None where some get another number or where :func:`check_blocks` would refuse any: it then says which.
    """
    try:
        flat = [block for ids in block_ids for (block,) in ids]
        has_all_groups = set(map(len, block_ids)) == {num_groups}
        array = np.array(flat)
    except (ValueError, TypeError):  # of other lengths, or no lists at all
        return None
    if not has_all_groups or array.dtype.kind not in "iu":
        return None
    if min(flat) <= NULL_BLOCK or max(flat) >= num_blocks:
        return None
    if any(len(set(flat[group::num_groups])) < len(block_ids) for group in range(num_groups)):  # see WrittenBlocks
        return None
    return array.astype(np.int64, copy=False).reshape(-1, num_groups)


def check_new(data: NewRequestData) -> None:
    """That a new request has an id and parameters of the right kind, and asks for nothing that no stage computes."""
    req_id = data.req_id
    if not isinstance(req_id, str) or not _is_text(req_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSchedulerOutput("its id must be a string of whole characters", req_id=req_id)
    if not isinstance(data.sampling_params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSchedulerOutput(
            f"its parameters must be SamplingParams, got {data.sampling_params!r:.80}", req_id=req_id
        )
    for name in ("lora_request", "pooling_params", "prompt_embeds"):
        if getattr(data, name) is not None:
            raise InvalidSchedulerOutput(f"{name} needs a stage that this runner does not have", req_id=req_id)
    if data.mm_features is not None and len(data.mm_features):  # pyright: ignore[reportUnnecessaryComparison]
        raise InvalidSchedulerOutput("mm_features need a stage that this runner does not have", req_id=req_id)


def _is_text(text: str) -> bool:
    """Whether it can be encoded; half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
