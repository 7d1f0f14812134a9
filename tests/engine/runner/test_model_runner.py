"""The runner's face: the order of calls, what a failure leaves behind, stage edits, sleep, dummy runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, Served, Wish
from modes import MODES
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.fsm import InputRefused, LifeState, StageFailed, StepState, StepStateError, WiringError
from twostroke.fsm.guard import GuardedMachine
from twostroke.stages.errors import InvalidGrammarOutput, InvalidSchedulerOutput
from twostroke.stages.forward_context import Model
from twostroke.stages.io import EMPTY_MODEL_RUNNER_OUTPUT, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from twostroke.stages.records import (
    Batch,
    CUDAGraphMode,
    ExecuteModelState,
    PreparedInputs,
    SamplerOutput,
)
from twostroke.stages.specs import NULL_BLOCK

PAIRING = r"sample_tokens\(\) must be called after execute_model\(\) returns None"
EMPTY = SchedulerOutput.make_empty()


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4), Wish("b", (4, 5), 4))
    return driver


# ---- the order of calls


def test_F2_wrong_orders_are_named_and_change_nothing(runner: ModelRunner, driver: Driver) -> None:
    with pytest.raises(StepStateError, match="IDLE"):
        runner.sample_tokens()
    output = driver.output({"a": 3})
    assert runner.execute_model(output) is None
    with pytest.raises(StepStateError, match=PAIRING):
        runner.execute_model(driver.output({"b": 2}))
    with pytest.raises(StepStateError, match=PAIRING):
        runner.execute_model(EMPTY)
    for call in (runner.settle, runner.dummy_run, runner.sleep, runner.wake_up, runner.profile_run):
        with pytest.raises(StepStateError, match="FORWARDED"):
            call()
    driver.launched(output, runner.sample_tokens())
    with pytest.raises(StepStateError, match="SAMPLED"):
        runner.sample_tokens()
    with pytest.raises(StepStateError):
        runner.rollback()
    assert runner.state is StepState.SAMPLED
    assert driver.requests["a"].outputs


def test_F2_a_step_without_samples_gives_an_output_not_none(driver: Driver) -> None:
    result = driver.stepped({"a": 2})
    assert isinstance(result, ModelRunnerOutput)
    assert result.sampled_token_ids == [[]]


def test_a_step_without_tokens_is_over_at_once(runner: ModelRunner, driver: Driver) -> None:
    driver.step({"a": 3})
    driver.finish("a")
    assert runner.execute_model(driver.output({})) is EMPTY_MODEL_RUNNER_OUTPUT
    assert runner.state is StepState.SAMPLED
    assert not runner.parts.table.records


def test_F1_the_forward_error_is_what_the_user_sees(
    runner: ModelRunner, driver: Driver, alone: dict[str, Served]
) -> None:
    driver.step({"a": 3})

    def broken(inputs: PreparedInputs) -> ExecuteModelState:
        raise ValueError("kernel fault")

    output = driver.output({"a": 1, "b": 2})
    with runner.stages.restored():
        runner.stages.replace("forward", broken)
        with pytest.raises(StageFailed, match=r"stage 'forward' failed in step 2 .*kernel fault") as raised:
            runner.execute_model(output)
        assert raised.value.request_ids == ("a", "b")
        with pytest.raises(StepStateError):
            runner.sample_tokens()
    assert runner.state is StepState.SAMPLED
    assert runner.execute_model(output) is None
    driver.launched(output, runner.sample_tokens())


def test_rollback_is_as_if_the_step_had_never_been(runner: ModelRunner, driver: Driver) -> None:
    driver.step({"a": 3})
    table = runner.parts.table
    tokens, rows = table.num_tokens.copy(), dict(table.rows)
    output = driver.output({"b": 2, "a": 1})
    runner.execute_model(output)
    assert len(table.rows) == 2
    runner.rollback()
    assert runner.state is StepState.IDLE
    assert table.rows == rows
    assert (table.num_tokens == tokens).all()
    runner.execute_model(output)
    driver.launched(output, runner.sample_tokens())
    assert len(driver.requests["b"].outputs) == 1


def test_a_failing_sample_can_be_retried_or_rolled_back(runner: ModelRunner, driver: Driver) -> None:
    output = driver.output({"a": 3})
    runner.execute_model(output)
    wrong = GrammarOutput(structured_output_request_ids=["a"], grammar_bitmask=np.zeros((1, 99), dtype=np.int32))
    with pytest.raises(InvalidGrammarOutput):
        runner.sample_tokens(wrong)
    assert runner.state is StepState.FORWARDED
    driver.launched(output, runner.sample_tokens())
    assert len(driver.requests["a"].outputs) == 1


def test_calls_from_a_second_thread_are_refused_not_queued(runner: ModelRunner, driver: Driver) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow(batch: Batch) -> None:
        entered.set()
        assert release.wait(10)

    runner.stages.insert(slow, after="update_states")
    output = driver.output({"a": 3})
    thread = threading.Thread(target=runner.execute_model, args=(output,), name="engine")
    thread.start()
    assert entered.wait(10)
    for call in (lambda: runner.execute_model(EMPTY), runner.sample_tokens, runner.shutdown, runner.sleep):
        with pytest.raises(StepStateError, match="engine"):
            call()
    assert runner.state is StepState.IDLE
    release.set()
    thread.join()
    assert runner.state is StepState.FORWARDED
    driver.launched(output, runner.sample_tokens())


def test_calls_from_inside_a_stage_are_refused(runner: ModelRunner, driver: Driver) -> None:
    seen: list[str] = []

    def nosy(batch: Batch) -> None:
        for call in (runner.sample_tokens, runner.dummy_run, lambda: runner.execute_model(EMPTY)):
            with pytest.raises(StepStateError, match="inside") as raised:
                call()
            seen.append(str(raised.value))
        with pytest.raises(StepStateError):
            runner.stages.remove("nosy")

    runner.stages.insert(nosy, after="update_states", name="nosy")
    driver.step({"a": 3})
    assert len(seen) == 3


@pytest.mark.parametrize("stage", ["prepare_inputs", "forward", "sample", "commit"])
def test_an_interrupt_undoes_the_step(runner: ModelRunner, driver: Driver, stage: str) -> None:
    driver.step({"a": 3})
    before = runner.parts.table.num_tokens.copy()

    class Interrupted:
        def __init__(self, inner: Callable[..., Any]) -> None:
            self.inner, self.armed = inner, True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = self.inner(*args, **kwargs)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return result

    runner.stages.wrap(stage, Interrupted)
    output = driver.output({"a": 1})
    in_sample = stage in ("sample", "commit")
    if in_sample:
        runner.execute_model(output)
    with pytest.raises(KeyboardInterrupt):
        runner.sample_tokens() if in_sample else runner.execute_model(output)
    assert (runner.parts.table.num_tokens == before).all()
    if not in_sample:
        runner.execute_model(output)
    driver.launched(output, runner.sample_tokens())
    assert len(driver.requests["a"].outputs) == 2


def test_refused_scheduler_output_leaves_the_runner_as_it_was(runner: ModelRunner, driver: Driver) -> None:
    driver.step({"a": 3})
    with pytest.raises(InvalidSchedulerOutput, match="'ghost'"):
        runner.execute_model(SchedulerOutput(num_scheduled_tokens={"ghost": 1}, total_num_scheduled_tokens=1))
    with pytest.raises(InvalidSchedulerOutput, match="sum to 0"):
        runner.execute_model(SchedulerOutput(total_num_scheduled_tokens=3))
    assert runner.state is StepState.SAMPLED
    driver.step({"a": 1})


# ---- life


def test_life_from_created_to_closed(model: Model) -> None:
    runner = ModelRunner(EngineConfig(max_model_len=24, block_size=4, num_kv_blocks=8), model=model)
    for call in (lambda: runner.execute_model(EMPTY), runner.sample_tokens, runner.capture_model, runner.dummy_run):
        with pytest.raises(StepStateError, match=r"load_model\(\)"):
            call()
    runner.load_model()
    with pytest.raises(StepStateError, match=r"initialize_kv_cache\(\)"):
        runner.execute_model(EMPTY)
    assert runner.profile_run().num_tokens > 0
    runner.initialize_kv_cache()
    assert runner.life is LifeState.READY
    with pytest.raises(StepStateError):
        runner.load_model()
    for _ in range(2):
        runner.shutdown()
    assert runner.life is LifeState.CLOSED
    with pytest.raises(StepStateError, match="shut down"):
        runner.execute_model(EMPTY)


def test_shutdown_with_a_step_open(runner: ModelRunner, driver: Driver) -> None:
    runner.execute_model(driver.output({"a": 3}))
    runner.shutdown()
    with pytest.raises(StepStateError, match="shut down"):
        runner.sample_tokens()


def test_F3_no_step_while_anything_sleeps(runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served]) -> None:
    driver, wish = Driver(runner), wishes[0]
    driver.add(wish)
    driver.step({wish.req_id: len(wish.prompt)})
    held = runner.parts.kv_cache.num_bytes
    assert held
    for _ in range(2):
        runner.sleep()
    assert runner.parts.kv_cache.num_bytes == 0
    runner.wake_up(["weights"])
    for call in (lambda: runner.execute_model(EMPTY), runner.dummy_run, runner.sample_tokens):
        with pytest.raises(StepStateError, match="wake_up"):
            call()
    for _ in range(2):
        runner.wake_up()
    assert runner.parts.kv_cache.num_bytes == held
    driver.output({}, preempted=[wish.req_id])
    driver.step({wish.req_id: driver.requests[wish.req_id].left})
    while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
        driver.step({wish.req_id: 1})
    driver.served(wish.req_id).assert_equals(alone[wish.req_id])


def test_sleep_refuses_what_it_cannot_do(runner: ModelRunner) -> None:
    with pytest.raises(InputRefused, match="level 3"):
        runner.sleep(3)
    with pytest.raises(InputRefused, match="level 2"):
        runner.sleep(2)
    runner.sleep()
    with pytest.raises(InputRefused, match="kv_cache"):
        runner.wake_up(["everything"])


# ---- stages


def test_F4_an_inserted_probe_sees_this_steps_rows(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(*(Wish(f"r{i}", (1, 2), 5) for i in range(3)))
    driver.step({"r0": 2, "r1": 2, "r2": 2})
    seen: list[dict[str, int]] = []

    def probe(batch: Batch, state: ExecuteModelState) -> None:
        seen.append(dict(zip(batch.req_ids, batch.rows.tolist(), strict=True)))

    runner.stages.insert(probe, after="forward", name="probe")
    driver.finish("r0")
    driver.add(Wish("r3", (1, 2), 5))
    driver.step({"r3": 2, "r2": 1, "r1": 1})
    assert seen == [runner.parts.table.rows]
    runner.stages.remove("probe")
    assert "probe" not in runner.stages.names


def test_a_replaced_sampler_decides(runner: ModelRunner, driver: Driver) -> None:
    def always_seven(inputs: PreparedInputs) -> SamplerOutput:
        return SamplerOutput(torch.full((len(inputs.sampling_reqs),), 7))

    with runner.stages.restored():
        runner.stages.replace("sample", always_seven)
        assert driver.stepped({"a": 3}).sampled_token_ids == [[7]]
    assert driver.stepped({"b": 2}).sampled_token_ids != [[7]]


def test_leaving_restored_with_a_step_open_raises_the_callers_own_exception(
    runner: ModelRunner, driver: Driver
) -> None:
    def edited_with_a_step_open(error: BaseException | None) -> None:
        with runner.stages.restored():
            runner.stages.insert(probe, before="forward")
            runner.execute_model(driver.output({"a": 3}))
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="mine") as raised:
        edited_with_a_step_open(KeyError("mine"))
    assert any("left the edits in place: StepStateError" in note for note in raised.value.__notes__)
    assert "probe" in runner.stages.names
    runner.rollback()
    runner.stages.remove("probe")
    with pytest.raises(StepStateError, match=r"stages\.restored"):
        edited_with_a_step_open(None)
    runner.rollback()


def probe(inputs: PreparedInputs) -> None:
    """Takes part and gives nothing."""


def test_what_an_interrupt_kept_from_the_caller_is_still_there(runner: ModelRunner, driver: Driver) -> None:
    assert runner.last_output is None
    first = driver.stepped({"a": 3})
    assert runner.last_output is first
    output = driver.output({"a": 1})
    runner.execute_model(output)
    assert runner.last_output is first

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        """A signal that arrives when the machine is done: what it returns reaches nobody."""
        if event == "return" and frame.f_code is GuardedMachine.fire.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.sample_tokens()
    assert (runner.state, runner.num_steps) == (StepState.SAMPLED, 2)
    lost = runner.last_output
    assert lost is not None
    assert lost is not first
    driver.launched(output, lost)
    driver.step({"a": 1})


def test_edits_are_refused_while_a_step_is_open_and_checked_always(runner: ModelRunner, driver: Driver) -> None:
    names = runner.stages.names
    with pytest.raises(WiringError, match="UBatchSlices"):
        runner.stages.remove("ubatch_slice")
    with pytest.raises(WiringError, match="no stage 'sampel'"):
        runner.stages.remove("sampel")
    with pytest.raises(WiringError, match="exactly one"):
        runner.stages.insert(lambda: None)
    runner.execute_model(driver.output({"a": 3}))
    with pytest.raises(StepStateError, match="FORWARDED"):
        runner.stages.wrap("sample", lambda inner: inner)
    assert runner.stages.names == names


def test_editing_a_captured_stage_drops_its_graphs(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(**MODES["full_and_piecewise"])
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 8))
    driver.step({"a": 3})
    captured = len(runner.parts.graphs.captured)
    assert captured
    runner.stages.wrap("sample", lambda inner: inner)
    assert len(runner.parts.graphs.captured) == captured, "the sampler is not part of a graph of the forward"
    runner.stages.wrap("preprocess", lambda inner: inner)
    assert not len(runner.parts.graphs.captured)
    driver.step({"a": 1})
    assert runner.parts.dispatch.counts[CUDAGraphMode.NONE, "stage 'preprocess' was edited"] == 1
    assert runner.capture_model() == captured
    driver.step({"a": 1})
    assert runner.parts.dispatch.counts[CUDAGraphMode.FULL, "best configured"] == 1


def test_a_forward_that_cannot_be_captured_says_so(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(**MODES["full"])
    runner.stages.wrap("forward", lambda inner: lambda *args, **kwargs: inner(*args, **kwargs))
    with pytest.raises(WiringError, match="cannot be captured"):
        runner.capture_model()
    assert runner.state is StepState.IDLE


# ---- dummy runs


@pytest.mark.parametrize("mode", ["eager", "full_and_piecewise", "two_ubatches"])
def test_dummy_runs_touch_no_request_and_no_block(make_runner: Callable[..., ModelRunner], mode: str) -> None:
    runner = make_runner(**MODES[mode])
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4))
    driver.step({"a": 3})
    table, caches = runner.parts.table, runner.parts.kv_cache.layers
    before, rows = [layer.clone() for layer in caches], dict(table.rows)
    for num_tokens in (1, 3, 16):
        runner.dummy_run(num_tokens)
    profile = runner.profile_run()
    assert profile.num_tokens == runner.config.max_num_batched_tokens
    assert table.rows == rows
    for layer, was in zip(caches, before, strict=True):
        assert torch.equal(layer, was)
        assert not layer[:, NULL_BLOCK].any()
    driver.step({"a": 1})


def test_large_shapes_are_captured_first_and_only_reachable_ones(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=(2, 4, 16))
    keys = list(runner.parts.graphs.captured)
    piecewise = [key.descriptor.num_tokens for key in keys if key.mode is CUDAGraphMode.PIECEWISE]
    full = [key.descriptor.num_tokens for key in keys if key.mode is CUDAGraphMode.FULL]
    assert piecewise == [16, 4, 2]
    assert full == [4, 2]


# ---- sampling at the boundary


def spoil(req_id: str, value: float) -> Callable[[Batch, PreparedInputs, ExecuteModelState], ExecuteModelState]:
    def spoiled(batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> ExecuteModelState:
        logits = state.logits.clone()
        for position, index in enumerate(inputs.sampling_reqs.tolist()):
            if batch.req_ids[index] == req_id:
                logits[inputs.sampling_logits[position]] = value
        return ExecuteModelState(logits, state.hidden_states)

    return spoiled


def test_W6_nan_logits_end_only_their_request(
    runner: ModelRunner, wishes: list[Wish], alone: dict[str, Served]
) -> None:
    driver = Driver(runner)
    sick = Wish("sick", (9, 8, 7), 4)
    driver.add(sick, *wishes[:2])
    runner.stages.insert(spoil("sick", float("nan")), after="forward", name="spoil")
    result = driver.stepped({req_id: len(request.wish.prompt) for req_id, request in driver.requests.items()})
    assert set(result.request_errors) == {"sick"}
    assert result.num_nans_in_logits == {"sick": runner.spec.vocab_size}
    driver.finish("sick")
    while any(len(driver.requests[w.req_id].outputs) < w.max_tokens for w in wishes[:2]):
        driver.step({w.req_id: 1 for w in wishes[:2] if len(driver.requests[w.req_id].outputs) < w.max_tokens})
    for wish in wishes[:2]:
        driver.served(wish.req_id).assert_equals(alone[wish.req_id])


def test_S3_grammar_rows_are_matched_by_id(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(Wish("p", (1, 2), 3), Wish("A", (3, 4), 3), Wish("q", (5, 6), 3), Wish("B", (7, 8, 9), 3))
    words = -(-runner.spec.vocab_size // 32)
    mask = np.zeros((2, words), dtype=np.int32)
    mask[0, 2 // 32], mask[1, 1 // 32] = 1 << 2, 1 << 1
    grammar = GrammarOutput(structured_output_request_ids=["B", "A"], grammar_bitmask=mask)
    free = driver.stepped({"p": 2, "q": 2}).sampled_token_ids
    driver.requests["p"].tokens.pop()
    driver.requests["q"].tokens.pop()
    again = Driver(runner, 1)
    again.finished = list("pq")
    again.add(*(request.wish for request in driver.requests.values()))
    result = again.stepped({"p": 2, "A": 2, "q": 2, "B": 1}, grammar=grammar)
    sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
    assert [sampled["p"], sampled["q"]] == free
    assert sampled["A"] == [1]
    assert sampled["B"] == []
    assert again.stepped({"B": 2}, grammar=grammar).sampled_token_ids == [[2]]


def test_outputs_stay_readable_after_the_next_step(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    first = driver.stepped({"a": 3})
    kept = first.logprobs.logprobs.copy() if first.logprobs is not None else None
    for _ in range(3):
        driver.step({"a": 1})
    assert first.logprobs is not None
    assert (first.logprobs.logprobs == kept).all()


def test_build_runner_takes_a_given_model(model: Model) -> None:
    runner = build_runner(EngineConfig(max_model_len=24, num_kv_blocks=8, block_size=4), model=model)
    assert runner.config.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert runner.spec is model.spec
