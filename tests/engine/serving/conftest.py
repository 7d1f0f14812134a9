"""A runner without a model, and a loop around it: what it "generates" can be read off the prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import define
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from twostroke.engine.loop_handle import RequestHandle
from twostroke.engine.scheduler import Scheduler, SchedulerConfig
from twostroke.engine.serving_loop import ServingLoop
from twostroke.engine.tokenizer import Tokenizer
from twostroke.fsm import LifeState, StageFailed, StepState
from twostroke.stages.io import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    GrammarOutput,
    LogprobsLists,
    ModelRunnerOutput,
    SchedulerOutput,
)
from twostroke.stages.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 257
BLOCK_SIZE = 4


class EchoOutput(AsyncModelRunnerOutput):
    """On its way until somebody waits for it; ``arrive`` is called then, and may raise."""

    def __init__(self, output: ModelRunnerOutput, arrive: Callable[[], None]) -> None:
        self._output = output
        self._arrive = arrive
        self._is_here = False

    def ready(self) -> bool:
        return self._is_here

    def get_output(self) -> ModelRunnerOutput:
        if not self._is_here:
            self._arrive()
            self._is_here = True
        return self._output


class EchoRunner:
    """Keeps the tokens of its requests as a model runner does, and "predicts" each prompt over and over again.

    ``faults`` maps "execute", "sample" and "arrive" to what is called with the step first, and may raise;
    ``request_errors`` has the error of a request, ``ends_after`` its number of tokens before the end of sequence.
    ``steps`` has what was run, in order.
    """

    def __init__(self, tokenizer: Tokenizer, config: SchedulerConfig, step_seconds: float = 0.0) -> None:
        template = SimpleNamespace(render=lambda messages, add_generation_prompt: messages[-1]["content"] + ">")
        self.loaded = SimpleNamespace(tokenizer=tokenizer, chat_template=template, eos_token_ids=(EOS,))
        self.spec = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.config = SimpleNamespace(async_scheduling=True, seed=0)
        self.kv_cache_generation = 0
        self.kv_groups = tuple(SimpleNamespace(block_size=size) for size in config.block_sizes)
        self.step_seconds = step_seconds
        self.state = StepState.IDLE
        self.life = LifeState.READY
        self.tokens: dict[str, list[int]] = {}
        self.prompt_lengths: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.faults: dict[str, Callable[[SchedulerOutput], None]] = {}
        self.request_errors: dict[str, Exception] = {}
        self.ends_after: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.steps: list[SchedulerOutput] = []
        self.masks: list[GrammarOutput | None] = []
        self._open: tuple[SchedulerOutput, dict[str, list[int]]] | None = None

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def check_params(self, params: SamplingParams) -> None:
        """Takes everything."""

    def sleep(self) -> None:
        """Forget every row, as a runner does; scheduled tokens of a request are then those of its resumption."""
        assert self.state is not StepState.FORWARDED
        self.life = LifeState.ASLEEP
        self.kv_cache_generation += 1
        self.tokens = {req_id: [] for req_id in self.tokens}

    def wake_up(self) -> None:
        self.life = LifeState.READY

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        assert self.state is not StepState.FORWARDED
        assert self.life is LifeState.READY
        self._meet_fault("execute", scheduled)
        before = {req_id: list(tokens) for req_id, tokens in self.tokens.items()}
        for req_id in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self.tokens.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} was not finished before it came again"
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.prompt_lengths[new.req_id] = len(new.prompt_token_ids)
            self.params[new.req_id] = new.sampling_params
        for req_id in scheduled.scheduled_cached_reqs.resumed_req_ids:
            self.tokens[req_id] = list(scheduled.scheduled_cached_reqs.all_token_ids[req_id])
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        time.sleep(self.step_seconds)
        self.inside.set()
        self.gate.wait()
        self._open, self.state = (scheduled, before), StepState.FORWARDED
        return None

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncModelRunnerOutput:
        assert self._open is not None
        scheduled = self._open[0]
        self._meet_fault("sample", scheduled)
        cached = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        req_ids = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for req_id in req_ids:
            tokens = self.tokens[req_id]
            samples = computed[req_id] + scheduled.num_scheduled_tokens[req_id] == len(tokens)
            fails = req_id in self.request_errors
            sampled.append([self._next_token(req_id, tokens)] if samples and not fails else [])
            tokens.extend(sampled[-1])
        self._open, self.state = None, StepState.SAMPLED
        self.steps.append(scheduled)
        self.masks.append(grammar)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=_logprobs(sampled),
            prompt_logprobs_dict=self._prompt_logprobs(scheduled),
            request_errors={key: error for key, error in self.request_errors.items() if key in req_ids},
        )
        return EchoOutput(output, lambda: self._meet_fault("arrive", scheduled))

    def rollback(self) -> None:
        assert self._open is not None
        self.tokens = self._open[1]
        self._open, self.state = None, StepState.IDLE

    def _next_token(self, req_id: str, tokens: list[int]) -> int:
        prompt_length = self.prompt_lengths[req_id]
        ends = len(tokens) - prompt_length == self.ends_after.get(req_id)
        return EOS if ends else tokens[len(tokens) - prompt_length]

    def _meet_fault(self, where: str, scheduled: SchedulerOutput) -> None:
        if scheduled.num_scheduled_tokens and where in self.faults:
            self.faults[where](scheduled)

    def _prompt_logprobs(self, scheduled: SchedulerOutput) -> dict[str, LogprobsLists | None]:
        return {
            new.req_id: _logprobs([list(new.prompt_token_ids[1:])])
            for new in scheduled.scheduled_new_reqs
            if new.sampling_params.prompt_logprobs is not None
        }


def _logprobs(sampled: list[list[int]]) -> LogprobsLists:
    """The chosen token with -1, and a runner-up (one id higher) with -2."""
    chosen = np.array([token for tokens in sampled for token in tokens], np.int64)
    ids = np.stack([chosen, chosen, (chosen + 1) % VOCAB_SIZE], axis=1)
    values = np.tile(np.array([-1.0, -1.0, -2.0], np.float32), (len(chosen), 1))
    offsets = [0, *np.cumsum([len(tokens) for tokens in sampled]).tolist()]
    return LogprobsLists(ids, values, np.ones(len(chosen), np.int64), offsets)


@define
class Bench:
    """A running loop over an :class:`EchoRunner`."""

    runner: EchoRunner
    loop: ServingLoop

    def hold_step(self) -> None:
        """Let the next step stop in its middle, until :meth:`release`."""
        self.runner.gate.clear()
        self.runner.inside.clear()

    def wait_inside(self) -> None:
        """Wait until a step is held."""
        assert self.runner.inside.wait(10)

    def release(self) -> None:
        """Let the held step go on."""
        self.runner.gate.set()

    def step_together(self, prompts: Sequence[str], params: SamplingParams) -> list[RequestHandle]:
        """Add requests, named by their prompts, so that they are prefilled in one step (as far as it has room)."""
        self.hold_step()
        self.loop.add("first", SamplingParams(max_tokens=1))
        self.wait_inside()
        handles = [self.loop.add(prompt, params, request_id=prompt) for prompt in prompts]
        self.release()
        return handles

    def settle(self) -> None:
        """Wait until the runner was told of every request's end."""
        deadline = time.monotonic() + 10
        while self.loop.scheduler.has_work() or self.runner.tokens:
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.001)


@pytest.fixture(scope="session")
def letters() -> Tokenizer:
    """One token a byte (in byte order), and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token_id=EOS)


def _byte_of(letter: str) -> int:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    if ord(letter) < 256:
        return ord(letter)
    return [byte for byte in range(256) if byte not in printable][ord(letter) - 256]


@pytest.fixture(params=[1, 2, 3], ids="depth{}".format)
def serve(letters: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    """Starts a loop over an echo runner; at the end it is stopped and nothing may be left of any request.

    Every test runs with each number of steps in flight.
    """
    started: list[Bench] = []

    def start(*, step_seconds: float = 0.0, start: bool = True, grammar: Any = None, **limits: Any) -> Bench:
        defaults = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "num_kv_blocks": 200,
            "block_sizes": (BLOCK_SIZE,),
        }
        config = SchedulerConfig(**defaults | limits)
        runner = EchoRunner(letters, config, step_seconds)
        loop = ServingLoop(runner, Scheduler(config), depth=request.param, grammar=grammar)  # pyright: ignore[reportArgumentType]
        started.append(Bench(runner, loop.start() if start else loop))
        return started[-1]

    yield start
    for bench in started:
        bench.runner.gate.set()
        bench.loop.stop()
        assert bench.loop.num_live_requests == 0
        if bench.loop.state.name != "DEAD":
            assert not bench.runner.tokens, "the runner was not told of every end"
            assert not bench.loop.scheduler.has_work()


@pytest.fixture
def failing() -> Callable[..., Callable[[SchedulerOutput], None]]:
    """Makes a stage that raises, as the pipeline reports it: in every step with one of these requests, or with anyone.

    ``times`` limits how often. ``fault.met`` counts.
    """

    def make(error: Exception, *req_ids: str, times: int = 10**9) -> Callable[[SchedulerOutput], None]:
        def fault(scheduled: SchedulerOutput) -> None:
            in_step = scheduled.num_scheduled_tokens
            if fault.met < times and (not req_ids or any(req_id in in_step for req_id in req_ids)):  # pyright: ignore[reportFunctionMemberAccess]
                fault.met += 1  # pyright: ignore[reportFunctionMemberAccess]
                raise StageFailed("forward", 1, tuple(in_step), error) from error

        fault.met = 0  # pyright: ignore[reportFunctionMemberAccess]
        return fault

    return make
