"""Seven properties that any step engine must have, on a tiny random model under random schedules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, Served, Wish
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.fsm import StageFailed, StepState
from twostroke.stages.input_buffers import PaddedBuffer
from twostroke.stages.specs import NULL_BLOCK, NULL_ROW

STAGES = (
    "update_states",
    "prepare_inputs",
    "dispatch",
    "ubatch_slice",
    "build_attn",
    "preprocess",
    "forward",
    "sample",
    "commit",
)


def assert_all_equal(got: dict[str, Served], expected: dict[str, Served]) -> None:
    assert got.keys() == expected.keys()
    for req_id, served in got.items():
        served.assert_equals(expected[req_id])


def test_solo_equals_batch(runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served]) -> None:
    driver = Driver(runner)
    for start in (0, 4):
        group = wishes[start : start + 4]
        driver.add(*group)
        for wish in group:
            driver.step({wish.req_id: len(wish.prompt)})
        for _ in range(max(wish.max_tokens for wish in group) - 1):
            driver.step({w.req_id: 1 for w in group if len(driver.requests[w.req_id].outputs) < w.max_tokens})
        for wish in group:
            driver.served(wish.req_id).assert_equals(alone[wish.req_id])
            driver.finish(wish.req_id)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_preemptions_and_neighbours_change_nothing(
    runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served], seed: int
) -> None:
    assert_all_equal(Driver(runner, seed).run_random(wishes, preempt=0.25), alone)


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9, [8, 1]])
def test_P1_seeded_output_does_not_depend_on_chunks(make_runner: Callable[..., ModelRunner], chunks: list[int]) -> None:
    runner = make_runner()
    wish = Wish("a", tuple(range(9)), 5, PARAMS["seeded"])
    outputs = []
    for split in ([9], chunks):
        driver = Driver(runner)
        driver.add(wish)
        for count in split:
            driver.step({"a": count})
        while len(driver.requests["a"].outputs) < 5:
            driver.step({"a": 1})
        outputs.append(driver.requests["a"].outputs)
        driver.finish("a")
        driver.step({})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", range(3))
def test_order_changes_nothing(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served], seed: int
) -> None:
    for shuffle in (False, True):
        driver = Driver(make_runner(), seed)
        order = list(wishes)
        driver.random.shuffle(order)
        assert_all_equal(driver.run_random(order, shuffle=shuffle), alone)


@pytest.mark.parametrize("mode", MODES)
def test_modes_change_nothing(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served], mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    for seed in range(2):
        assert_all_equal(Driver(runner, seed).run_random(wishes), alone)
    used = {mode.name for mode, _ in runner.parts.dispatch.counts}
    if "cudagraph_mode" in MODES[mode]:
        assert used - {"NONE"}, "no graph was ever replayed"


class Poison:
    """An observer that spoils everything that no stage may read, right before a step reads anything."""

    def __init__(self, runner: ModelRunner, driver: Driver) -> None:
        self.parts, self.driver = runner.parts, driver
        self.random = np.random.default_rng(0)

    def before_stage(self, name: str) -> None:
        if name == "prepare_inputs":
            self.spoil()

    def after_stage(self, name: str, seconds: float, record: object) -> None: ...

    def stage_failed(self, name: str, error: BaseException) -> None: ...

    def spoil(self) -> None:
        table = self.parts.table
        live = set(table.rows.values())
        for row in range(table.num_rows):
            known = int(table.num_tokens[row]) if row in live else 0
            if row != NULL_ROW:
                table.token_ids_host[row, known:] = 2**31 - 1
            for blocks in table.block_tables:
                blocks.blocks[row, int(blocks.counts[row]) if row in live else 0 :] = (
                    NULL_BLOCK if row == NULL_ROW else 2**31 - 1
                )
        if self.random.random() < 0.5:  # or the step goes on from what the one before left in the buffers
            self.spoil_buffers()
        held = {
            int(block)
            for row in live
            for blocks in table.block_tables
            for block in blocks.blocks[row, : blocks.counts[row]]
        }
        free = [block for block in range(self.parts.kv_cache.num_blocks) if block not in held]
        for layer in self.parts.kv_cache.layers:
            layer[:, free] = torch.nan

    def spoil_buffers(self) -> None:
        buffers = self.parts.buffers
        buffers.forget()
        buffers.input_ids.fill_(2**30)
        for buffer in (buffers.tokens, buffers.requests, *buffers.slot_mapping, *buffers.block_table):
            # Whatever a step that filled all of it may have left there.
            array = buffer.pad(buffer.array.shape[-1]) if isinstance(buffer, PaddedBuffer) else buffer.array
            array[:] = 2**30


@pytest.mark.parametrize("mode", MODES)
def test_poisoned_rows_tails_and_blocks_change_nothing(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served], mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    driver = Driver(runner, 1)
    runner.observers.add(Poison(runner, driver))
    assert_all_equal(driver.run_random(wishes), alone)
    assert runner.observers.failures == 0


@pytest.mark.parametrize("mode", ["eager", "full_and_piecewise"])
def test_nothing_is_left_when_all_are_finished(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], mode: str
) -> None:
    runner = make_runner(**MODES[mode])
    driver, parts = Driver(runner, 3), runner.parts
    driver.add(wishes[0])
    driver.step({wishes[0].req_id: len(wishes[0].prompt)})
    record = weakref.ref(parts.table.records[wishes[0].req_id])
    driver.finish(wishes[0].req_id)
    driver.run_random(wishes)
    gc.collect()
    assert record() is None, "a finished request's record is still referenced"
    table = parts.table
    assert not table.records
    assert not table.rows
    assert sorted(table._free_rows) == list(range(1, table.num_rows))
    assert not parts.columns.lists
    for row in range(table.num_rows):
        assert parts.columns.is_default(row)
        assert not any(blocks.counts[row] for blocks in table.block_tables)
    for array in (table.num_tokens, table.num_prompt_tokens, table.num_computed_tokens, table.owes_prompt_logprobs):
        assert not array.any()
    for layer in parts.kv_cache.layers:
        assert not layer[:, NULL_BLOCK].any(), "the null block was written"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_finished_request_is_let_go_at_once(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], is_async: bool
) -> None:
    runner = make_runner(async_scheduling=is_async)
    driver, req_id = Driver(runner, 3), wishes[0].req_id
    driver.add(wishes[0])
    driver.step({req_id: len(wishes[0].prompt)})
    driver.step({req_id: 1})
    runner.settle()
    record = weakref.ref(runner.parts.table.records[req_id])
    driver.finish(req_id)
    driver.step({})
    gc.collect()
    assert record() is None


class RaisesOnce:
    """A stage that fails the first time, before or after its work."""

    def __init__(self, inner: Any, after: bool) -> None:
        self.inner, self.after, self.armed = inner, after, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.inner(*args, **kwargs) if self.after or not self.armed else None
        if self.armed:
            self.armed = False
            raise OSError("the disk is on fire")
        return result


@pytest.mark.parametrize("error_after_work", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_failing_stage_loses_nothing(
    runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served], stage: str, error_after_work: bool
) -> None:
    driver = Driver(runner)
    first, second, third = wishes[:3]
    driver.add(first, second)
    driver.step({first.req_id: len(first.prompt), second.req_id: 1})
    driver.add(third)
    output = driver.output({first.req_id: 1, third.req_id: len(third.prompt)}, preempted=[second.req_id])
    runner.stages.wrap(stage, lambda inner: RaisesOnce(inner, error_after_work))
    in_sample = stage in ("sample", "commit")
    if in_sample:
        runner.execute_model(output)
    with pytest.raises(StageFailed, match="disk is on fire") as raised:
        runner.sample_tokens() if in_sample else runner.execute_model(output)
    assert raised.value.stage == stage
    assert isinstance(raised.value.__cause__, OSError)
    assert runner.state is (StepState.FORWARDED if in_sample else StepState.SAMPLED)
    if not in_sample:
        assert runner.execute_model(output) is None
    driver.launched(output, runner.sample_tokens())
    for wish in (first, second, third):
        while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
            driver.step({wish.req_id: 1})
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])
