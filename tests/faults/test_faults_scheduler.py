"""Chapter L: requests come, go, fail and come again; the loop and the runner stay clean."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field
from driver import Driver, Served, Wish, serve_alone
from modes import MODES, PARAMS
from twostroke.engine import cli, cli_generate
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.scheduler import FinishReason, RequestUpdate, Scheduler, SchedulerConfig
from twostroke.engine.serving_loop import LoopState, ServingLoop, ServingLoopDown
from twostroke.fsm import LifeState, StageFailed, StepState
from twostroke.stages.request_table import RequestRecord
from twostroke.stages.sampling_params import SamplingParams

MakeRunner = Callable[..., ModelRunner]
FinishAll = Callable[[Driver], dict[str, Served]]


def scheduler_for(runner: ModelRunner, **changes: Any) -> Scheduler:
    """The reference scheduler with the limits of a runner."""
    config = runner.config
    assert isinstance(config.max_model_len, int)
    assert isinstance(config.num_kv_blocks, int)
    limits: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "num_kv_blocks": config.num_kv_blocks,
        "block_sizes": (config.block_size,),
    }
    return Scheduler(SchedulerConfig(**limits | changes))


@define
class Life:
    """One request in the storm, and what came of it."""

    wish: Wish
    tokens: list[int] = field(factory=list)
    prompt_logprobs: list[np.ndarray] = field(factory=list)


class Storm:
    """Adds, aborts, reuses ids and lets stages fail, at random; everyone who ends must have what they get alone."""

    NUM_REQUESTS, NUM_IDS = 9, 4

    def __init__(self, runner: ModelRunner, reference: ModelRunner, seed: int) -> None:
        self.random = random.Random(seed)
        self.runner, self.reference = runner, reference
        self.scheduler = scheduler_for(
            runner,
            enable_prefix_caching=seed % 3 != 0,
            long_prefill_token_threshold=self.random.choice([0, 3, 7]),
        )
        self.living: dict[str, Life] = {}
        self.text = [self.random.randrange(64) for _ in range(20)]
        self.added = self.ended = self.failures = 0

    def flaky(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A stage that fails now and then, before its work or after."""

        def stage(*args: Any) -> Any:
            luck = self.random.random()
            if luck < 0.004:
                raise OSError("before")
            result = inner(*args)
            if luck > 0.996:
                raise OSError("after")
            return result

        return stage

    def run(self) -> None:
        """Until all are served."""
        for _ in range(1500):
            if self.added == self.NUM_REQUESTS and not self.scheduler.has_work():
                return
            if self.added < self.NUM_REQUESTS and self.random.random() < 0.5:
                self.add()
            self.abort_some()
            scheduled = self.scheduler.schedule()
            self.abort_some()
            try:
                output = self.runner.execute_model(scheduled)
                if output is None:
                    output = self.runner.sample_tokens().get_output()
            except StageFailed:
                self.failures += 1
                if self.runner.state is StepState.FORWARDED:
                    self.runner.rollback()
                self.scheduler.rollback(scheduled)
                continue
            if scheduled.num_scheduled_tokens:
                for update in self.scheduler.update_from_output(scheduled, output):
                    self.take(update)
        raise AssertionError("the storm never ends")

    def add(self) -> None:
        req_id = f"r{self.added % self.NUM_IDS}"
        if req_id in self.living:
            return
        shared = self.random.randrange(1, 19)
        prompt = (*self.text[:shared], *(self.random.randrange(64) for _ in range(self.random.randrange(3))))
        params = evolve(self.random.choice(list(PARAMS.values())), min_tokens=0, max_tokens=self.random.randrange(1, 8))
        self.living[req_id] = Life(Wish(req_id, prompt, 0, params))
        self.scheduler.add_request(req_id, prompt, params)
        self.added += 1

    def abort_some(self) -> None:
        if self.living and self.random.random() < 0.04:
            req_id = self.random.choice(list(self.living))
            assert self.scheduler.finish_requests([req_id, "ghost", req_id]) == [req_id]
            del self.living[req_id]

    def take(self, update: RequestUpdate) -> None:
        assert update.error is None
        life = self.living[update.req_id]
        life.tokens += update.new_token_ids
        if update.prompt_logprobs is not None:
            life.prompt_logprobs.append(update.prompt_logprobs.logprobs)
        if update.finish_reason is None:
            return
        del self.living[update.req_id]
        self.ended += 1
        wish = evolve(life.wish, max_tokens=len(life.tokens))
        alone = serve_alone(self.reference, wish)
        assert tuple(life.tokens) == alone.tokens
        assert len(life.prompt_logprobs) == (wish.params.prompt_logprobs is not None)
        for table in life.prompt_logprobs:
            assert alone.prompt_logprobs is not None
            np.testing.assert_allclose(table, alone.prompt_logprobs, atol=1e-4)
        if update.finish_reason is FinishReason.LENGTH:
            assert len(life.tokens) == min(wish.params.max_tokens or 24, 24 - len(wish.prompt))


@pytest.mark.parametrize(("mode", "seed"), [("eager", 0), ("two_ubatches", 1), ("block_size_2", 2), ("eager", 4)])
def test_L1_L3_L6_any_order_of_adds_aborts_failures_and_used_ids(make_runner: MakeRunner, mode: str, seed: int) -> None:
    few = 15 if mode == "block_size_2" else 9  # the longest request fits, and little beside it
    runner = make_runner(**{**MODES[mode], "num_kv_blocks": few})
    storm = Storm(runner, make_runner(max_num_batched_tokens=24), seed)
    for name in runner.stages.names:
        runner.stages.wrap(name, storm.flaky)
    storm.run()
    assert storm.ended
    table = runner.parts.table
    assert not table.records
    assert sorted(table._free_rows) == list(range(1, table.num_rows))
    assert storm.scheduler.stats().kv_cache_usage == 0


def test_L6_the_last_end_reaches_the_runner_in_a_step_without_tokens(runner: ModelRunner) -> None:
    scheduler = scheduler_for(runner)
    scheduler.add_request("only", [1, 2, 3], SamplingParams(max_tokens=2))
    steps = 0
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        steps += 1
        if runner.execute_model(scheduled) is None:
            scheduler.update_from_output(scheduled, runner.sample_tokens().get_output())
    assert steps == 3
    assert not runner.parts.table.records
    assert not runner.parts.columns.lists


@pytest.mark.parametrize("resumed", [False, True])
def test_L1_an_id_that_is_finished_and_new_in_one_step_starts_clean(
    runner: ModelRunner, finish_all: FinishAll, make_runner: MakeRunner, resumed: bool
) -> None:
    again = Wish("x", (9, 8), 5, PARAMS["greedy"])
    driver = Driver(runner)
    driver.add(Wish("x", (1, 2, 3, 4, 5), 9, PARAMS["masked"]))
    driver.step({"x": 5})
    driver.step({"x": 1})
    if resumed:
        driver.step({}, preempted=["x"])
    driver.finish("x")
    driver.add(again)
    driver.step({"x": 2})
    finish_all(driver)["x"].assert_equals(serve_alone(make_runner(), again))
    assert not runner.parts.table.records


class DropFails:
    """A column that cannot let go."""

    def add(self, row: int, request: RequestRecord) -> None: ...

    def drop(self, row: int) -> None:
        raise OSError("the file is gone")

    def flush(self) -> None: ...


def test_L3_L11_what_cannot_be_finished_faults_the_runner_and_ends_the_loop(runner: ModelRunner) -> None:
    """The loop is unhealthy, says why to whoever waits and whoever comes, and its thread is gone."""
    runner.parts.table.columns += (DropFails(),)
    loop = ServingLoop(runner).start()
    first = loop.add([1, 2], SamplingParams(max_tokens=1))
    assert len(first.result(timeout=20).outputs[0].token_ids) == 1

    def go_on() -> None:
        while True:
            loop.add([3, 4], SamplingParams(max_tokens=20)).result(timeout=20)

    with pytest.raises(ServingLoopDown, match="the file is gone"):
        go_on()
    loop.stop()
    assert loop.state is LoopState.DEAD
    assert not loop.healthy
    assert loop.num_live_requests == 0
    assert runner.life is LifeState.FAULTED
    assert "the file is gone" in runner.fault_reason


def test_L11_the_command_fails_when_the_engine_dies(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*args: object, **kwargs: object) -> object:
        raise MemoryError("no room for another page")

    monkeypatch.setattr(cli_generate, "build_runner", lambda config: runner)
    monkeypatch.setattr(cli_generate, "_prompts", lambda args, texts: [[1, 2, 3]] * len(texts))
    monkeypatch.setattr(Scheduler, "update_from_output", explode)
    assert cli.main(["generate", "--prompt", "x", "--prompt", "y", "--max-tokens", "3", "--plain"]) == 1
    assert "no room for another page" in capsys.readouterr().err
