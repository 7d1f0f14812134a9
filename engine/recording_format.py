"""The lines of a recording: what goes into a step and comes out of it, as plain values and back. Torch-free.

A recording is JSON lines. The first is the header (``kind`` "recording"); the others say which ``step`` they belong to:

- ``step``: the scheduler's output, with its own field names; empty fields are left out.
- ``grammar``: the masks of a step.
- ``output``: what the step gave: its plan, requests, tokens, log probabilities, errors, and its stages' times: name,
  start since the recording began, and duration, in nanoseconds. Follows when the output is known.
- ``times``: the stages of a step that has no output, because it scheduled nothing or failed.
- ``failed``, ``rollback``: a stroke that raised, a step that was taken back. ``settle`` stands between steps.
- ``state``: requests that were live before the first step, where a recording starts in the middle of a run.

Request ids are kept as they are, redacted or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import fields

from ..stages.io import (
    BlockIds,
    CachedRequestData,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from ..stages.sampling_params import SamplingParams

VERSION = 1
Fields = dict[str, Any]
TokenWriter = Callable[[Sequence[int]], Any]

_NEW_ONLY = ("lora_request", "mm_features", "pooling_params", "prompt_embeds")
_STEP_ONLY = ("scheduled_encoder_inputs", "free_encoder_mm_hashes", "kv_connector_metadata")
_DEFAULTS = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
_TELLING = frozenset(
    {"stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "bad_words_token_ids", "extra"}
)
"""Sampling parameters that may tell of the text; a redacted recording leaves them out."""


def show(tokens: Sequence[int]) -> list[int]:
    """Token ids as they are."""
    return list(tokens)


def redact(tokens: Sequence[int]) -> Fields:
    """How many token ids there are, and nothing else."""
    return {"redacted": len(tokens)}


def stand_ins(value: Any) -> list[int]:
    """Token ids of a line: as written, or for redacted ones as many of small, mixed ids that every vocabulary has."""
    return [(7 * index + 3) % 29 for index in range(value["redacted"])] if isinstance(value, dict) else list(value)


# ---- to lines


def step_fields(output: SchedulerOutput, tokens: TokenWriter = show) -> Fields:
    """A scheduler output, copied; lists that the scheduler goes on using are safe."""
    line: Fields = {}
    if output.scheduled_new_reqs:
        line["scheduled_new_reqs"] = [_new_fields(data, tokens) for data in output.scheduled_new_reqs]
    if output.scheduled_cached_reqs.req_ids:
        line["scheduled_cached_reqs"] = _cached_fields(output.scheduled_cached_reqs, tokens)
    line["num_scheduled_tokens"] = dict(output.num_scheduled_tokens)
    if output.finished_req_ids:
        line["finished_req_ids"] = sorted(output.finished_req_ids)
    if output.preempted_req_ids:
        line["preempted_req_ids"] = sorted(output.preempted_req_ids)
    if any(output.num_common_prefix_blocks):
        line["num_common_prefix_blocks"] = list(output.num_common_prefix_blocks)
    if output.scheduled_spec_decode_tokens:
        drafts = output.scheduled_spec_decode_tokens
        line["scheduled_spec_decode_tokens"] = {req_id: tokens(ids) for req_id, ids in drafts.items()}
    if left_out := [name for name in _STEP_ONLY if _is_there(getattr(output, name))]:
        line["left_out"] = left_out
    return line


def _new_fields(data: NewRequestData, tokens: TokenWriter) -> Fields:
    line: Fields = {
        "req_id": data.req_id,
        "prompt_token_ids": tokens(data.prompt_token_ids),
        "block_ids": [list(ids) for ids in data.block_ids],
        "num_computed_tokens": data.num_computed_tokens,
        "sampling_params": params_fields(data.sampling_params, is_redacted=tokens is redact),
    }
    if data.prefill_token_ids is not None:
        line["prefill_token_ids"] = tokens(data.prefill_token_ids)
    if left_out := [name for name in _NEW_ONLY if _is_there(getattr(data, name))]:
        line["left_out"] = left_out
    return line


def _cached_fields(data: CachedRequestData, tokens: TokenWriter) -> Fields:
    line: Fields = {"req_ids": list(data.req_ids)}
    if data.resumed_req_ids:
        line["resumed_req_ids"] = sorted(data.resumed_req_ids)
    if any(map(len, data.new_token_ids)):
        line["new_token_ids"] = [tokens(ids) for ids in data.new_token_ids]
    if data.all_token_ids:
        line["all_token_ids"] = {req_id: tokens(ids) for req_id, ids in data.all_token_ids.items()}
    if any(ids is not None for ids in data.new_block_ids):
        line["new_block_ids"] = block_fields(data.new_block_ids)
    line["num_computed_tokens"] = list(data.num_computed_tokens)
    if data.num_output_tokens:
        line["num_output_tokens"] = list(data.num_output_tokens)
    return line


def block_fields(new_block_ids: Sequence[BlockIds | None]) -> list[list[list[int]] | None]:
    """New blocks of several requests, copied."""
    return [ids if ids is None else [list(group) for group in ids] for ids in new_block_ids]


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, (Sequence, Mapping)) and not len(value))


def params_fields(params: SamplingParams, *, is_redacted: bool = False) -> Fields:
    """Parameters that are not at their defaults."""
    line: Fields = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default and not (is_redacted and name in _TELLING):
            line[name] = dict(value) if isinstance(value, Mapping) else value
    return line


def grammar_fields(grammar: GrammarOutput) -> Fields:
    """Masks, as rows of 32-bit words in hexadecimal."""
    rows = np.ascontiguousarray(grammar.grammar_bitmask, dtype="<i4")
    return {"req_ids": list(grammar.structured_output_request_ids), "bitmask": [row.tobytes().hex() for row in rows]}


def output_fields(output: ModelRunnerOutput, tokens: TokenWriter = show) -> Fields:
    """What a step gave. Log probabilities are rounded to six digits; None stands for minus infinity."""
    line: Fields = {
        "req_ids": list(output.req_ids),
        "sampled_token_ids": [tokens(ids) for ids in output.sampled_token_ids],
    }
    if output.request_errors:
        line["errors"] = {req_id: str(error) for req_id, error in output.request_errors.items()}
    if tokens is redact:
        return line
    if output.logprobs is not None:
        lists = {req_id: output.logprobs.for_request(index) for index, req_id in enumerate(output.req_ids)}
        line["logprobs"] = {req_id: _logprobs_fields(own) for req_id, own in lists.items() if len(own.logprobs)}
    whole = {req_id: table for req_id, table in output.prompt_logprobs_dict.items() if table is not None}
    if whole:
        line["prompt_logprobs"] = {req_id: _logprobs_fields(table) for req_id, table in whole.items()}
    return line


def _logprobs_fields(lists: LogprobsLists) -> list[Any]:
    values = np.round(lists.logprobs.astype(np.float64), 6).tolist()
    values = [[value if math.isfinite(value) else None for value in row] for row in values]
    return [lists.logprob_token_ids.tolist(), values, lists.sampled_token_ranks.tolist()]


# ---- from lines


def scheduler_output(line: Mapping[str, Any]) -> SchedulerOutput:
    """The scheduler output of a ``step`` line."""
    cached: Mapping[str, Any] = line.get("scheduled_cached_reqs") or {"req_ids": ()}
    counts = line["num_scheduled_tokens"]
    drafts = line.get("scheduled_spec_decode_tokens", {})
    return SchedulerOutput(
        scheduled_new_reqs=[_new_request(data) for data in line.get("scheduled_new_reqs", ())],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=cached["req_ids"],
            resumed_req_ids=frozenset(cached.get("resumed_req_ids", ())),
            new_token_ids=[stand_ins(ids) for ids in cached.get("new_token_ids", ())],
            all_token_ids={key: stand_ins(ids) for key, ids in cached.get("all_token_ids", {}).items()},
            new_block_ids=cached.get("new_block_ids", ()),
            num_computed_tokens=cached.get("num_computed_tokens", ()),
            num_output_tokens=cached.get("num_output_tokens", ()),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={req_id: stand_ins(ids) for req_id, ids in drafts.items()},
        num_common_prefix_blocks=line.get("num_common_prefix_blocks", ()),
        finished_req_ids=frozenset(line.get("finished_req_ids", ())),
        preempted_req_ids=frozenset(line.get("preempted_req_ids", ())),
    )


def _new_request(line: Mapping[str, Any]) -> NewRequestData:
    prefill = line.get("prefill_token_ids")
    return NewRequestData(
        req_id=line["req_id"],
        prompt_token_ids=stand_ins(line["prompt_token_ids"]),
        block_ids=line["block_ids"],
        num_computed_tokens=line["num_computed_tokens"],
        sampling_params=sampling_params(line["sampling_params"]),
        prefill_token_ids=None if prefill is None else stand_ins(prefill),
    )


def sampling_params(line: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a line; those that this version does not know are ignored."""
    known: Fields = {name: value for name, value in line.items() if name in _DEFAULTS}
    if known.get("logit_bias") is not None:
        known["logit_bias"] = {int(token): bias for token, bias in known["logit_bias"].items()}
    return SamplingParams(**known)


def grammar_output(line: Mapping[str, Any]) -> GrammarOutput:
    """The masks of a ``grammar`` line."""
    rows = [np.frombuffer(bytes.fromhex(row), dtype="<i4").astype(np.int32) for row in line["bitmask"]]
    return GrammarOutput(structured_output_request_ids=line["req_ids"], grammar_bitmask=np.array(rows, dtype=np.int32))
