"""The same prompts with one set of stages and with another, taking turns: how fast each is, and whether they agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

from attrs import define, evolve, field, frozen

from ..fsm import StageTimes
from ..stages.sampling_params import SamplingParams
from .loop_admission import Prompt
from .model_runner import ModelRunner
from .plugins import apply_stages
from .serving_loop import ServingLoop

Stages = Sequence[tuple[str, Callable[..., Any]]]
WARM_UP_TOKENS = 2


@frozen(eq=False)
class Run:
    """All prompts once. ``tokens`` are the outputs by prompt, ``stage_ms`` host time a step by stage."""

    seconds: float
    tokens: tuple[tuple[int, ...], ...]
    stage_ms: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall clock, from the first step to the last token."""
        return sum(map(len, self.tokens)) / self.seconds


@define(eq=False)
class Arm:
    """One of the two sets of stages, and its runs."""

    name: str
    runs: list[Run] = field(factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over the runs."""
        return median(run.tokens_per_second for run in self.runs)

    @property
    def spread(self) -> float:
        """Fastest less slowest run, as a share of the median."""
        speeds = [run.tokens_per_second for run in self.runs]
        return (max(speeds) - min(speeds)) / median(speeds)

    @property
    def is_reproducible(self) -> bool:
        """Whether every run gave the same tokens."""
        return all(run.tokens == self.runs[0].tokens for run in self.runs)

    def stage_ms(self, stage: str) -> float:
        """Median host time a step, in milliseconds; 0 where there is no such stage."""
        return median(run.stage_ms.get(stage, 0.0) for run in self.runs)


@frozen(eq=False)
class Comparison:
    """A (as the runner was) and B (with stages swapped)."""

    a: Arm
    b: Arm

    @property
    def stages(self) -> tuple[str, ...]:
        """Every stage that ran in either."""
        return tuple(dict.fromkeys(name for arm in (self.a, self.b) for run in arm.runs for name in run.stage_ms))

    @property
    def first_differences(self) -> tuple[int | None, ...]:
        """For each prompt the first position where the tokens differ, None if they are equal throughout."""
        return tuple(map(first_difference, self.a.runs[0].tokens, self.b.runs[0].tokens))

    @property
    def agreement(self) -> float:
        """Share of positions that have equal tokens in both; where one text is longer, its rest counts as different."""
        pairs = list(zip(self.a.runs[0].tokens, self.b.runs[0].tokens, strict=True))
        equal = sum(one == two for left, right in pairs for one, two in zip(left, right, strict=False))
        return equal / max(sum(max(len(left), len(right)) for left, right in pairs), 1)

    @property
    def speedup(self) -> float:
        """Tokens per second of B over those of A."""
        return self.b.tokens_per_second / self.a.tokens_per_second

    def verdict(self) -> str:
        """One line: which is faster, if that is more than the runs of one arm differ, and whether the tokens agree."""
        noise = max(self.a.spread, self.b.spread)
        ratio = max(self.speedup, 1 / self.speedup)
        if ratio - 1 <= noise:
            speed = f"A and B are equally fast within the noise (B/A {self.speedup:.2f}, runs differ by {noise:.0%})"
        else:
            speed = f"{'B' if self.speedup > 1 else 'A'} is {ratio:.2f} times as fast (runs differ by {noise:.0%})"
        differing = [index for index, place in enumerate(self.first_differences) if place is not None]
        if not differing:
            tokens = "all tokens are equal"
        else:
            tokens = (
                f"{self.agreement:.1%} of the tokens are equal; {len(differing)} of {len(self.first_differences)} "
                f"prompts differ, prompt {differing[0]} from position {self.first_differences[differing[0]]} on"
            )
        unsteady = "".join(
            f"; {arm.name} differs from run to run" for arm in (self.a, self.b) if not arm.is_reproducible
        )
        return f"{speed}; {tokens}{unsteady}"


def compare_stages(
    runner: ModelRunner,
    stages: Stages,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    repeats: int = 3,
) -> Comparison:
    """Serve ``prompts`` with the runner's stages as they are and with ``stages`` in place, ``repeats`` times each.

    The two take turns, and take turns in going first. Every run begins with all prompts waiting and an empty prefix
    cache, so that the batches are the same each time; a short run of each before them is not counted. The runner's
    stages are left as they were; its graphs are captured again where an edit dropped them.

    Raises:
        WiringError: a stage does not fit.
        TwoStrokeError: a prompt was refused or failed.
    """
    a, b = Arm("A"), Arm("B")
    warm_up = [_shortened(own) for own in params]
    for turn in range(repeats + 1):
        for arm in (a, b) if turn % 2 else (b, a):
            with runner.stages.restored() if arm is b else nullcontext():
                if arm is b:
                    apply_stages(stages, runner.parts)
                if runner.config.cudagraph_mode != "NONE":
                    runner.capture_model()
                run = _run(runner, prompts, params if turn else warm_up)
            if turn:
                arm.runs.append(run)
    return Comparison(a, b)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two texts differ, or one of them has ended; None if they are equal."""
    if tuple(left) == tuple(right):
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, two) in pairs if one != two), min(len(left), len(right)))


def _shortened(params: SamplingParams) -> SamplingParams:
    return evolve(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS), min_tokens=0)


def _run(runner: ModelRunner, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Run:
    times = StageTimes()
    with ServingLoop(runner) as loop:
        loop.pause("keep")
        handles = [loop.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        runner.observers.add(times)
        try:
            started = time.perf_counter()
            loop.resume()
            results = [handle.result() for handle in handles]
            seconds = time.perf_counter() - started
        finally:
            runner.observers.remove(times)
        num_steps = max(loop.num_steps, 1)
    tokens = tuple(tuple(result.outputs[0].token_ids) for result in results)
    return Run(seconds, tokens, {name: total / num_steps * 1e3 for name, total in times.seconds.items()})
