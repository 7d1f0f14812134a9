"""Calls that are not legal, and scheduler outputs that contradict themselves or what a runner knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import StepState
from twostroke.stages.io import CachedRequestData, NewRequestData, SchedulerOutput
from twostroke.stages.records import Batch

Call = Callable[[ModelRunner], object]


def _probe(batch: Batch) -> None:
    """A stage that does nothing."""


def _restore(runner: ModelRunner) -> None:
    with runner.stages.restored():
        pass


SECOND_STROKE: Mapping[str, Call] = {
    "sample_tokens": lambda runner: runner.sample_tokens(),
    "rollback": lambda runner: runner.rollback(),
}
BETWEEN_STEPS: Mapping[str, Call] = {
    "execute_model": lambda runner: runner.execute_model(SchedulerOutput.make_empty()),
    "dummy_run": lambda runner: runner.dummy_run(),
    "capture_model": lambda runner: runner.capture_model(),
    "settle": lambda runner: runner.settle(),
    "sleep": lambda runner: runner.sleep(),
    "wake_up": lambda runner: runner.wake_up(),
    "update_weights": lambda runner: runner.update_weights([]),
    "stages.insert": lambda runner: runner.stages.insert(_probe, after="update_states"),
    "stages.wrap": lambda runner: runner.stages.wrap("sample", lambda inner: inner),
    "stages.replace": lambda runner: runner.stages.replace("gate", _probe),
    "stages.remove": lambda runner: runner.stages.remove("gate"),
    "stages.restored": _restore,
}
ONCE: Mapping[str, Call] = {
    "load_model": lambda runner: runner.load_model(),
    "initialize_kv_cache": lambda runner: runner.initialize_kv_cache(),
}
NEEDS_MEMORY = ("execute_model", "dummy_run", "capture_model")
INSIDE_A_CALL: Mapping[str, Call] = {**SECOND_STROKE, **BETWEEN_STEPS, "shutdown": lambda runner: runner.shutdown()}


def illegal_calls(state: StepState, *, is_asleep: bool = False) -> dict[str, Call]:
    """Every call that must be refused now, by name."""
    if is_asleep:
        return {**SECOND_STROKE, **ONCE, **{name: BETWEEN_STEPS[name] for name in NEEDS_MEMORY}}
    return {**ONCE, **(BETWEEN_STEPS if state is StepState.FORWARDED else SECOND_STROKE)}


Mistake = Callable[[random.Random, SchedulerOutput, Any], SchedulerOutput | None]


def _with_cached(output: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    return evolve(output, scheduled_cached_reqs=evolve(output.scheduled_cached_reqs, **changes))


def _with_new(output: SchedulerOutput, **changes: Any) -> SchedulerOutput | None:
    if not output.scheduled_new_reqs:
        return None
    first, *rest = output.scheduled_new_reqs
    return evolve(output, scheduled_new_reqs=[evolve(first, **changes), *rest])


def _with_counts(output: SchedulerOutput, counts: Mapping[str, int]) -> SchedulerOutput:
    return evolve(output, num_scheduled_tokens=dict(counts), total_num_scheduled_tokens=sum(counts.values()))


def _recount(output: SchedulerOutput, chooser: random.Random, change: Callable[[int], int]) -> SchedulerOutput:
    req_id = chooser.choice(list(output.num_scheduled_tokens))
    counts = dict(output.num_scheduled_tokens)
    counts[req_id] = change(counts[req_id])
    return _with_counts(output, counts)


def _replaced(values: Any, index: int, value: Any) -> list[Any]:
    return [value if position == index else kept for position, kept in enumerate(values)]


def _any_index(chooser: random.Random, cached: CachedRequestData) -> int:
    return chooser.randrange(len(cached.req_ids))


def wrong_total(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """The sum is not the sum."""
    return evolve(output, total_num_scheduled_tokens=output.total_num_scheduled_tokens + chooser.choice([-1, 1]))


def no_tokens(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """A request with no tokens, or fewer."""
    return _recount(output, chooser, lambda count: chooser.choice([0, -1]))


def too_many_tokens(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """More than the request has, or than a step may have."""
    return _recount(output, chooser, lambda count: count + chooser.choice([24, 1000]))


def nobody(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """Tokens for a request in neither list."""
    return _with_counts(output, {**output.num_scheduled_tokens, "nobody": 1})


def left_out(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """A request of a list without tokens."""
    gone = chooser.choice(list(output.num_scheduled_tokens))
    return _with_counts(output, {req_id: n for req_id, n in output.num_scheduled_tokens.items() if req_id != gone})


def unknown(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """A continued request that was never sent."""
    cached = output.scheduled_cached_reqs
    blocks = cached.new_block_ids and [*cached.new_block_ids, [[1] for _ in runner.kv_groups]]
    tokens, outputs = cached.new_token_ids and [*cached.new_token_ids, []], cached.num_output_tokens
    added = _with_cached(
        output,
        req_ids=[*cached.req_ids, "unknown"],
        new_block_ids=blocks,
        new_token_ids=tokens,
        num_computed_tokens=[*cached.num_computed_tokens, 0],
        num_output_tokens=outputs and [*outputs, 0],
    )
    return _with_counts(added, {**output.num_scheduled_tokens, "unknown": 1})


def twice(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """A request in the list of new ones twice."""
    news = output.scheduled_new_reqs
    return evolve(output, scheduled_new_reqs=[*news, news[0]]) if news else None


def bad_prompt(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """No prompt, or one with ids outside the vocabulary."""
    return _with_new(output, prompt_token_ids=chooser.choice([[], [-1], [runner.spec.vocab_size]]))


def bad_prefill(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """Known tokens that do not start with the prompt."""
    return _with_new(output, prefill_token_ids=[63, 62, 61, 60])


def bad_blocks(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """The null block, one beyond the pool, none at all, too many, or blocks for a group that is not there."""
    groups, limit = len(runner.kv_groups), runner.parts.kv_cache.num_blocks
    tables = [[[0]] * groups, [[limit]] * groups, [[]] * groups, [[1]] * (groups + 1), [list(range(1, 30))] * groups]
    return _with_new(output, block_ids=chooser.choice(tables))


def bad_params(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """Parameters for a larger vocabulary."""
    if not output.scheduled_new_reqs:
        return None
    params = output.scheduled_new_reqs[0].sampling_params
    return _with_new(output, sampling_params=evolve(params, allowed_token_ids=(1, runner.spec.vocab_size)))


def unserved(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """A feature that this runner has no stage for."""
    return _with_new(output, **{chooser.choice(["lora_request", "pooling_params", "prompt_embeds"]): object()})


def unserved_step(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """Speculative tokens or a connector that this runner has no stage for."""
    spec = {next(iter(output.num_scheduled_tokens)): [1]}
    changes = chooser.choice([{"scheduled_spec_decode_tokens": spec}, {"kv_connector_metadata": object()}])
    return evolve(output, **changes)


def new_while_live(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """A live request sent as new."""
    gone = {*output.finished_req_ids, *(output.preempted_req_ids or ()), *output.num_scheduled_tokens}
    live = [req_id for req_id in runner.parts.table.rows if req_id not in gone]
    if not live:
        return None
    data = NewRequestData(req_id=live[0], prompt_token_ids=[1], block_ids=[[1] for _ in runner.kv_groups])
    added = evolve(output, scheduled_new_reqs=[*output.scheduled_new_reqs, data])
    return _with_counts(added, {**output.num_scheduled_tokens, live[0]: 1})


def bad_count(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """Computed tokens below zero, or entries missing."""
    cached = output.scheduled_cached_reqs
    if not cached.req_ids:
        return None
    index = _any_index(chooser, cached)
    wrong = [_replaced(cached.num_computed_tokens, index, -1), [*cached.num_computed_tokens, 0]]
    return _with_cached(output, num_computed_tokens=chooser.choice(wrong))


def too_many_outputs(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """The scheduler counts more tokens than the runner knows."""
    cached = output.scheduled_cached_reqs
    said = cached.resumed_req_ids | cached.all_token_ids.keys()
    ids = [req_id for req_id in cached.req_ids if req_id not in said]
    if not ids or not cached.num_output_tokens or cached.new_token_ids:
        return None
    index = list(cached.req_ids).index(chooser.choice(ids))
    return _with_cached(output, num_output_tokens=_replaced(cached.num_output_tokens, index, 100))


def resumed_without_blocks(
    chooser: random.Random, output: SchedulerOutput, runner: ModelRunner
) -> SchedulerOutput | None:
    """A request comes back and holds nothing."""
    cached = output.scheduled_cached_reqs
    ids = [index for index, req_id in enumerate(cached.req_ids) if req_id in cached.resumed_req_ids]
    return _with_cached(output, new_block_ids=_replaced(cached.new_block_ids, ids[0], None)) if ids else None


def resumed_nobody(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput:
    """A request comes back that is not scheduled."""
    return _with_cached(output, resumed_req_ids={*output.scheduled_cached_reqs.resumed_req_ids, "nobody"})


def gone(chooser: random.Random, output: SchedulerOutput, runner: ModelRunner) -> SchedulerOutput | None:
    """A continued request that this step finishes or preempts."""
    cached = output.scheduled_cached_reqs
    ids = [req_id for req_id in cached.req_ids if req_id not in cached.resumed_req_ids]
    if not ids:
        return None
    if chooser.random() < 0.5:
        return evolve(output, finished_req_ids={*output.finished_req_ids, ids[0]})
    return evolve(output, preempted_req_ids={*(output.preempted_req_ids or ()), ids[0]})


MISTAKES: tuple[Mistake, ...] = (
    wrong_total,
    no_tokens,
    too_many_tokens,
    nobody,
    left_out,
    unknown,
    twice,
    bad_prompt,
    bad_prefill,
    bad_blocks,
    bad_params,
    unserved,
    unserved_step,
    new_while_live,
    bad_count,
    too_many_outputs,
    resumed_without_blocks,
    resumed_nobody,
    gone,
)
