"""A step that fails: find the requests that are to blame, and run the others all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..fsm import InputRefused, StageFailed
from ..stages.errors import InvalidSchedulerOutput, RequestFailed
from ..stages.io import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput, SchedulerOutput
from .loop_grammar import GrammarFailed

V = TypeVar("V")
N = TypeVar("N", np.int64, np.float32)

StepOutput = ModelRunnerOutput | AsyncModelRunnerOutput
UNDONE = (StageFailed, InputRefused, GrammarFailed)
"""Errors of a stroke that left nothing behind: it can be tried again, or the step be run in parts."""


def run_in_parts(
    scheduled: SchedulerOutput, error: Exception, run: Callable[[SchedulerOutput], StepOutput]
) -> ModelRunnerOutput:
    """The output of a step that failed with ``error`` and was undone, from parts of it.

    Failing parts are halved until one request is left, which has then failed twice; a request that the error names is
    taken out at once. Requests to blame are in ``request_errors`` of the output, with the error of the last part that
    they were in as the cause. At most ``2 * log2(n) + 2`` parts are run: with one request to blame that is enough, with
    many what has not run by then fails too. Waits for the output of every part.

    Raises:
        Exception: what ``run`` raised and the runner has not undone; or a step without requests failed again.
    """
    req_ids = tuple(scheduled.num_scheduled_tokens)
    blamed: dict[str, Exception] = {}
    done: list[StepOutput] = []
    waiting = [req_ids] if len(req_ids) <= 1 else _smaller(req_ids, error, blamed)
    num_left = 2 * (len(req_ids) - 1).bit_length() + 2
    while waiting and num_left:
        num_left -= 1
        part = waiting.pop()
        try:
            done.append(run(scheduled.restricted_to(part, is_first=not done)))
        except UNDONE as part_error:
            if not part:
                raise
            error = part_error
            waiting += _smaller(part, error, blamed)
    for part in waiting:
        blamed |= dict.fromkeys(part, error)
    if not done:  # the runner has yet to hear of the requests that have ended
        done.append(run(scheduled.restricted_to(())))
    return merged([part.get_output() for part in done], {key: _failure(key, cause) for key, cause in blamed.items()})


def _smaller(req_ids: tuple[str, ...], error: Exception, blamed: dict[str, Exception]) -> list[tuple[str, ...]]:
    """What is left to try of a part that failed, latest first; puts who is to blame for certain into ``blamed``."""
    if isinstance(error, InvalidSchedulerOutput) and error.req_id in req_ids:
        blamed[error.req_id] = error
        rest = tuple(req_id for req_id in req_ids if req_id != error.req_id)
        return [rest] if rest else []
    if len(req_ids) == 1:
        blamed[req_ids[0]] = error
        return []
    middle = (len(req_ids) + 1) // 2
    return [req_ids[middle:], req_ids[:middle]]


def _failure(req_id: str, cause: Exception) -> RequestFailed:
    failure = RequestFailed(req_id, str(cause))
    failure.__cause__ = cause
    return failure


def merged(parts: Sequence[ModelRunnerOutput], errors: Mapping[str, Exception]) -> ModelRunnerOutput:
    """One output for requests that were run in parts; ``errors`` are of requests that are in none of them."""
    req_ids = [req_id for part in parts for req_id in part.req_ids]
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[tokens for part in parts for tokens in part.sampled_token_ids],
        logprobs=_merged_logprobs(parts),
        prompt_logprobs_dict=_union(part.prompt_logprobs_dict for part in parts),
        pooler_output=[pooled for part in parts for pooled in part.pooler_output],
        num_nans_in_logits=_union(part.num_nans_in_logits for part in parts),
        request_errors=_union((errors, *(part.request_errors for part in parts))),
    )


def _union(mappings: Iterable[Mapping[str, V]]) -> dict[str, V]:
    return dict(chain.from_iterable(mapping.items() for mapping in mappings))


def _merged_logprobs(parts: Sequence[ModelRunnerOutput]) -> LogprobsLists | None:
    """Rows one below the other, as wide as the widest, with offsets for every request of every part."""
    tables = [part.logprobs for part in parts if part.logprobs is not None]
    if not tables:
        return None
    width = max(table.logprobs.shape[1] for table in tables)
    offsets = [0]
    for part in parts:
        own = part.logprobs.cu_num_generated_tokens if part.logprobs is not None else None
        offsets += [offsets[-1] + end for end in (own or [0] * (len(part.req_ids) + 1))[1:]]
    return LogprobsLists(
        np.concatenate([_widened(table.logprob_token_ids, width, -1) for table in tables]),
        np.concatenate([_widened(table.logprobs, width, -np.inf) for table in tables]),
        np.concatenate([table.sampled_token_ranks for table in tables]),
        offsets,
    )


def _widened(rows: npt.NDArray[N], width: int, value: float) -> npt.NDArray[N]:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)
