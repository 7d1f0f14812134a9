"""Which logits row each grammar mask belongs to."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from ..errors import InvalidGrammarOutput
from ..io import GrammarOutput
from ..records import Batch, PreparedInputs


@frozen(eq=False)
class GrammarRows:
    """Masks of requests that sample now: int64 ``[g]`` positions among these, and int32 ``[g, words]`` masks."""

    positions: torch.Tensor
    bitmask: torch.Tensor


def match_grammar(
    grammar: GrammarOutput | None, batch: Batch, inputs: PreparedInputs, vocab_size: int
) -> GrammarRows | None:
    """Find the sampling request of each mask, by id; None when nothing is constrained.

    Masks of requests that do not sample in this step, or are not in the batch, are left out.

    Raises:
        InvalidGrammarOutput: a mask of another shape or type than ids and vocabulary ask for, or an id listed twice.
    """
    if grammar is None or not len(grammar.structured_output_request_ids):
        return None
    req_ids = grammar.structured_output_request_ids
    bitmask = _checked_bitmask(grammar.grammar_bitmask, len(req_ids), vocab_size)
    source = {req_id: index for index, req_id in enumerate(req_ids)}
    if len(source) < len(req_ids):
        twice = next(req_id for index, req_id in enumerate(req_ids) if source[req_id] != index)
        raise InvalidGrammarOutput(f"request {twice!r} has more than one row in structured_output_request_ids")
    sampling_ids = [batch.req_ids[int(index)] for index in inputs.sampling_reqs]
    positions = [position for position, req_id in enumerate(sampling_ids) if req_id in source]
    if not positions:
        return None
    masks = bitmask[[source[sampling_ids[position]] for position in positions]]
    return GrammarRows(torch.tensor(positions), torch.from_numpy(masks))


def _checked_bitmask(bitmask: object, num_rows: int, vocab_size: int) -> np.ndarray:
    if not isinstance(bitmask, np.ndarray):
        raise InvalidGrammarOutput(f"grammar_bitmask is a {type(bitmask).__name__}; pass a numpy int32 array")
    if bitmask.dtype != np.int32:
        raise InvalidGrammarOutput(f"grammar_bitmask has dtype {bitmask.dtype}; expected int32")
    expected = (num_rows, -(-vocab_size // 32))
    if bitmask.shape != expected:
        raise InvalidGrammarOutput(
            f"grammar_bitmask has shape {bitmask.shape}; expected {expected}: one row for each of "
            f"structured_output_request_ids, one word for every 32 of {vocab_size} tokens"
        )
    return bitmask
