"""Deterministic mode: logits of a request have the same bits alone and in any batch, chunking, padding and mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Driver, Wish, serve_alone
from modes import MODES, PARAMS
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models.invariant import OTHER_SIZES, BatchInvarianceLost, InvariantModel, RowBlocks, split_rows
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.serving_loop import ServingLoop
from twostroke.fsm import StageObserver
from twostroke.stages.forward_context import Model
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs
from twostroke.stages.sampling_params import SamplingParams

KINDS = ("greedy", "unseeded", "penalised", "prompt_logprobs")
WISHES = [
    Wish(kind, tuple((7 * i + 3 * j) % 60 for j in range(3 + 4 * i)), 4, PARAMS[kind]) for i, kind in enumerate(KINDS)
]

Logits = dict[tuple[str, int], torch.Tensor]


class Tap(StageObserver):
    """The logits of every request by the position that they are sampled for, each of which may come more than once."""

    def __init__(self) -> None:
        self.logits: Logits = {}
        self.differences: list[tuple[str, int]] = []

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        if isinstance(record, Batch):
            self.batch = record
        elif isinstance(record, PreparedInputs):
            self.inputs = record
        elif isinstance(record, ExecuteModelState):
            ends = self.batch.num_computed_tokens + self.batch.num_scheduled_tokens
            for request, row in zip(self.inputs.sampling_reqs, self.inputs.sampling_logits, strict=True):
                key = self.batch.req_ids[int(request)], int(ends[request])
                before = self.logits.setdefault(key, record.logits[row].clone())
                if not torch.equal(before, record.logits[row]):
                    self.differences.append(key)


@pytest.fixture(scope="module")
def alone(make_runner: Callable[..., ModelRunner]) -> Logits:
    """Every request by itself, eager and unchunked."""
    return tapped(
        make_runner(batch_invariant=True), lambda runner: [serve_alone(runner, wish) for wish in WISHES]
    ).logits


def tapped(runner: ModelRunner, serve: Callable[[ModelRunner], object], known: Logits | None = None) -> Tap:
    """What was seen while serving; differences are from ``known`` and among themselves."""
    tap = Tap()
    tap.logits |= known or {}
    runner.observers.add(tap)
    serve(runner)
    assert not runner.observers.failures
    return tap


@pytest.mark.parametrize("mode", MODES)
def test_solo_is_batch_to_the_last_bit(make_runner: Callable[..., ModelRunner], alone: Logits, mode: str) -> None:
    """Random schedules with chunks, preemptions and neighbours."""
    runner = make_runner(batch_invariant=True, **MODES[mode])
    tap = tapped(runner, lambda runner: Driver(runner, 1).run_random(WISHES, preempt=0.2), alone)
    assert not tap.differences
    assert tap.logits.keys() == alone.keys()
    used = {mode.name for mode, _ in runner.parts.dispatch.counts}
    assert ("cudagraph_mode" in MODES[mode]) == bool(used - {"NONE"})


def test_the_oracle_bites(make_runner: Callable[..., ModelRunner], alone: Logits) -> None:
    """The model as it is, whose sums are in other orders, does not pass."""
    tap = tapped(make_runner(), lambda runner: Driver(runner, 1).run_random(WISHES, preempt=0.2), alone)
    assert tap.differences
    assert all(torch.allclose(alone[key], logits, atol=1e-4) for key, logits in tap.logits.items())


def test_tokens_and_logprobs_are_those_of_the_plain_model(make_runner: Callable[..., ModelRunner]) -> None:
    plain, invariant = make_runner(), make_runner(batch_invariant=True)
    for wish in WISHES:
        serve_alone(invariant, wish).assert_equals(serve_alone(plain, wish))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_long_prompts_in_any_chunks(
    make_runner: Callable[..., ModelRunner], architecture: str, window: int | None
) -> None:
    """Beyond one tile of keys, where the number of keys of a product grows; with windows that begin inside a tile."""
    model = random_model(tiny_config(architecture, max_position_embeddings=256, sliding_window=window))
    limits = {"max_model_len": 256, "num_kv_blocks": 200, "max_num_batched_tokens": 256, "model": model}
    long, short = Wish("long", tuple(i * 7 % 61 for i in range(150)), 3), Wish("short", (1, 2, 3), 9)
    runner = make_runner(batch_invariant=True, **limits)
    seen = tapped(runner, lambda runner: [serve_alone(runner, wish) for wish in (long, short)]).logits

    def in_chunks(runner: ModelRunner) -> None:
        driver = Driver(runner, 3)
        driver.add(short, long)
        for counts in ({"short": 3}, {"short": 1, "long": 63}, {"long": 2}, {"short": 1, "long": 66}, {"long": 19}):
            driver.step(counts)
        driver.step({"short": 1}, preempted=["long"])
        for counts in ({"short": 1, "long": 151}, {"short": 1, "long": 1}, {"short": 1}):
            driver.step(counts)

    tap = tapped(runner, in_chunks, seen)
    assert not tap.differences
    served = serve_alone(make_runner(**limits), long)
    served.assert_equals(serve_alone(make_runner(batch_invariant=True, **limits), long))


def test_prefix_caching_changes_no_bit(make_runner: Callable[..., ModelRunner]) -> None:
    runner, tokens = make_runner(batch_invariant=True), list(range(11))
    params, seen = SamplingParams(temperature=0, max_tokens=4), []
    with ServingLoop(runner) as loop:
        for name in ("first", "again"):
            tap = tapped(runner, lambda _: loop.add(tokens, params, "r").result())
            seen.append((tap.logits, name))
            runner.observers.remove(tap)
        assert loop.add(tokens, params).result().num_cached_tokens > 0
    assert all(torch.equal(seen[0][0][key], logits) for key, logits in seen[1][0].items())
    assert seen[1][0].keys() == seen[0][0].keys()


def test_half_precision(make_runner: Callable[..., ModelRunner]) -> None:
    model = random_model(tiny_config(), dtype=torch.bfloat16)
    runner = make_runner(batch_invariant=True, dtype="bfloat16", model=model)
    seen = tapped(runner, lambda runner: [serve_alone(runner, wish) for wish in WISHES]).logits
    assert not tapped(runner, lambda runner: Driver(runner, 2).run_random(WISHES), seen).differences


@pytest.mark.parametrize("name", ["embedding", "layers.1.attention_input", "layers.0.mlp", "norm", "logits"])
def test_activations_are_observed_whole_and_steered(
    make_runner: Callable[..., ModelRunner], alone: Logits, name: str
) -> None:
    """Hooks see all rows of a step at once, though no piece does; looking changes no bit, steering changes the same."""
    seen: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for is_invariant, tensors in seen.items():
        runner = make_runner(batch_invariant=is_invariant)
        with runner.observe(name, lambda activation, tensors=tensors: tensors.append(activation.tensor.clone())):
            tap = tapped(runner, lambda runner: Driver(runner, 1).run_random(WISHES), alone if is_invariant else None)
        assert not is_invariant or not tap.differences
    for plain, invariant in zip(seen[False], seen[True], strict=True):
        torch.testing.assert_close(plain, invariant, atol=1e-4, rtol=0)
    steered: list[Logits] = []
    for is_invariant in seen:
        runner = make_runner(batch_invariant=is_invariant)
        with runner.observe(name, lambda activation: activation.tensor * 0.5, edit=True):
            steered.append(tapped(runner, lambda runner: serve_alone(runner, WISHES[1])).logits)
    first = (WISHES[1].req_id, len(WISHES[1].prompt))
    torch.testing.assert_close(steered[0][first], steered[1][first], atol=1e-4, rtol=0)
    assert not torch.equal(steered[1][first], alone[first])


@pytest.mark.parametrize(
    ("num_rows", "sizes", "expected"),
    [
        (1, (4, 8), [(0, 4)]),
        (8, (4, 8), [(0, 8)]),
        (13, (4, 8), [(0, 8), (8, 4), (12, 4)]),
        (100, (8, 64), [(0, 64), (64, 8), (72, 8), (80, 8), (88, 8), (96, 8)]),
        (3, (8,), [(0, 8)]),
    ],
)
def test_rows_are_split(num_rows: int, sizes: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert list(split_rows(num_rows, sizes)) == expected


class Kernel:
    """Doubles rows, with an error in the last bits that depends on the number of rows, as real kernels have."""

    def __init__(self, *odd_sizes: int, by_place: bool = False) -> None:
        self.odd_sizes, self.by_place = odd_sizes, by_place
        self.calls: list[int] = []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(rows))
        result = rows * 2 + (1e-6 if len(rows) in self.odd_sizes else 0)
        return result + (torch.arange(len(rows))[:, None] * 1e-6 if self.by_place else 0)


def test_a_size_that_gives_other_bits_is_refused_for_good() -> None:
    blocks, kernel, rows = RowBlocks(), Kernel(4, 64), torch.rand(101, 3)
    expected = rows * 2
    for count in (3, 64, 101, 1, 70):
        assert torch.equal(blocks.run(0, kernel, rows[:count]), expected[:count])
    assert blocks.sizes == (8, 16, 32)
    kernel.calls.clear()
    assert torch.equal(blocks.run(0, kernel, rows), expected)
    assert kernel.calls == [32, 32, 32, 8], "nothing is compared twice"


def test_a_size_is_refused_by_one_function_for_all() -> None:
    blocks, rows = RowBlocks(), torch.rand(16, 3)
    blocks.run(0, Kernel(), rows)
    assert blocks.sizes == tuple(sorted((8, *OTHER_SIZES)))
    assert torch.equal(blocks.run(1, Kernel(16), rows), rows * 2)
    assert 16 not in blocks.sizes


def test_a_kernel_that_depends_on_the_place_of_a_row_is_an_error() -> None:
    with pytest.raises(BatchInvarianceLost, match=r"piece 5 .* threads"):
        RowBlocks().run(5, Kernel(by_place=True), torch.rand(3, 2))


def test_several_tensors_and_none_at_all() -> None:
    blocks = RowBlocks()
    left, right = torch.rand(21, 2), torch.rand(21, 4)
    total, product = blocks.run(0, lambda a, b: (a.sum(1), b * 2), left, right)
    assert torch.equal(total, left.sum(1))
    assert torch.equal(product, right * 2)
    assert blocks.run(0, Kernel(), torch.empty(0, 2)).shape == (0, 2)


def test_a_runner_says_which_sizes_it_uses(make_runner: Callable[..., ModelRunner], model: Model) -> None:
    wrapped = InvariantModel(model)
    assert wrapped.spec is model.spec
    assert set(wrapped.block_sizes) == {8, *OTHER_SIZES}
    assert make_runner(batch_invariant=True).spec == model.spec
