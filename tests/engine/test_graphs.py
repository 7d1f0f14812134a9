"""Graph runners: the stand-in replays what it captured, in whole and in pieces; plans live as long as their graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from twostroke.engine.attention.paged_cpu import PagedCPUBackend
from twostroke.engine.graphs import ClosureGraphRunner, EagerRunner
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.graphs import (
    CUDAGraphRunner,
    ForwardFunction,
    ForwardOutput,
    GraphError,
    GraphKey,
    GraphNotCaptured,
    PlanCache,
)
from twostroke.stages.records import (
    EAGER_SEGMENTS,
    BatchDescriptor,
    BatchExecutionDescriptor,
    CUDAGraphMode,
    ModelInputs,
    SegmentRunner,
)
from twostroke.stages.specs import AttentionLayerSpec, KVCacheGroupSpec

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CAPACITY = 8


def plan(mode: CUDAGraphMode, num_tokens: int = 4, should_ubatch: bool = False) -> BatchExecutionDescriptor:
    key = BatchDescriptor(num_tokens, num_tokens, True) if mode is FULL else BatchDescriptor(num_tokens)
    return BatchExecutionDescriptor(
        mode=mode,
        num_tokens=num_tokens,
        num_reqs=num_tokens,
        descriptor=None if mode is NONE else key,
        should_ubatch=should_ubatch,
    )


class Buffers:
    """The fixed buffers of a toy engine."""

    def __init__(self) -> None:
        self.ids = torch.zeros(CAPACITY, dtype=torch.int32)
        self.positions = torch.zeros(CAPACITY, dtype=torch.int64)

    def fill(self, *ids: int, reset_tail: bool = True) -> None:
        self.ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        if reset_tail:
            self.ids[len(ids) :] = 0

    def inputs(self, num_tokens: int = 4, start: int = 0) -> ModelInputs:
        return ModelInputs(self.ids[start : start + num_tokens], self.positions[start : start + num_tokens])


class Toy:
    """Three pieces with an attention between each two that looks at all tokens; counts how often pieces are entered."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls: list[int] = []

    def embed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(0)
        hidden = ids.float().unsqueeze(1) * torch.tensor([1.0, 2.0])
        return hidden, hidden + 1

    def middle(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(1)
        return attended * self.scale + residual, residual * 2

    def last(self, attended: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls.append(2)
        return attended + residual + positions.unsqueeze(1)

    def __call__(self, inputs: ModelInputs, segments: SegmentRunner) -> torch.Tensor:
        hidden, residual = segments.run(0, self.embed, inputs.input_ids)
        hidden, residual = segments.run(1, self.middle, hidden.cumsum(0), residual)
        return segments.run(2, self.last, hidden.cumsum(0), residual, inputs.positions)


def first(output: ForwardOutput) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    return output


@pytest.fixture
def buffers() -> Buffers:
    return Buffers()


@pytest.fixture
def runner() -> ClosureGraphRunner:
    return ClosureGraphRunner()


def captured(runner: ClosureGraphRunner, buffers: Buffers, mode: CUDAGraphMode, forward: Toy | None = None) -> Toy:
    toy = forward or Toy()
    buffers.fill(7, 7, 7, 7)
    runner.capture(plan(mode), toy, buffers.inputs())
    return toy


@pytest.mark.parametrize("make", [EagerRunner, ClosureGraphRunner])
def test_mode_none_calls_the_forward(make: Callable[[], CUDAGraphRunner], buffers: Buffers) -> None:
    buffers.fill(1, 2, 3, 4)
    expected = Toy()(buffers.inputs(), EAGER_SEGMENTS)
    assert torch.equal(first(make().run(plan(NONE), Toy(), buffers.inputs())), expected)


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_a_replay_equals_an_eager_run(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, mode)
    for ids in ((1, 2, 3, 4), (4, 3, 0, 0), (9, 9, 9, 9)):
        buffers.fill(*ids)
        buffers.positions[:4] = torch.tensor(ids)
        expected = Toy()(buffers.inputs(), EAGER_SEGMENTS)
        assert torch.equal(first(runner.run(plan(mode), Toy(), buffers.inputs())), expected)


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_a_replay_runs_what_was_captured(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    old = captured(runner, buffers, mode)
    old.calls.clear()
    new = Toy(scale=100.0)
    output = first(runner.run(plan(mode), new, buffers.inputs()))
    assert old.calls == [0, 1, 2]
    assert new.calls == []
    assert torch.equal(output, Toy()(buffers.inputs(), EAGER_SEGMENTS))


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_rebinding_a_buffer_shows(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, mode)
    buffers.fill(1, 2, 3, 4)
    expected = Toy()(buffers.inputs(), EAGER_SEGMENTS)
    buffers.ids = torch.tensor([5, 6, 7, 8], dtype=torch.int32)  # a new tensor, where a fill was meant
    assert torch.equal(first(runner.run(plan(mode), Toy(), buffers.inputs())), expected)


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_G4_a_stale_tail_shows(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, mode)
    buffers.fill(1, 2, 3, reset_tail=False)
    stale = first(runner.run(plan(mode), Toy(), buffers.inputs())).clone()
    assert stale[3, 0] == Toy()(buffers.inputs(), EAGER_SEGMENTS)[3, 0]
    buffers.fill(1, 2, 3)
    clean = first(runner.run(plan(mode), Toy(), buffers.inputs()))
    assert stale[3, 0] != clean[3, 0]
    assert torch.equal(stale[:3], clean[:3])


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_outputs_keep_their_address(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, mode)
    one = first(runner.run(plan(mode), Toy(), buffers.inputs()))
    before = one.clone()
    buffers.fill(3, 3, 3, 3)
    two = first(runner.run(plan(mode), Toy(), buffers.inputs()))
    assert two.data_ptr() == one.data_ptr()
    assert not torch.equal(before, two)


def test_pieces_read_fixed_buffers_and_copy_other_inputs(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, PIECEWISE)
    entries = next(iter(runner._pieces.values()))
    assert entries[0].inputs == (None,)  # token ids lie in a fixed buffer
    assert [tensor is None for tensor in entries[1].inputs] == [False, True]  # attention's result; piece 0's result
    assert [tensor is None for tensor in entries[2].inputs] == [False, True, True]


def test_a_full_graph_may_return_several_tensors(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    def forward(inputs: ModelInputs, segments: SegmentRunner) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = Toy()(inputs, segments)
        return hidden, hidden.sum(1)

    runner.capture(plan(FULL), forward, buffers.inputs())
    buffers.fill(1, 2, 3, 4)
    hidden, logits = runner.run(plan(FULL), forward, buffers.inputs())
    assert torch.equal(logits, hidden.sum(1))
    assert logits.any()


def test_each_micro_batch_has_its_own_pieces(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    split = plan(PIECEWISE, 8, should_ubatch=True)
    halves = [buffers.inputs(3), buffers.inputs(5, start=3)]
    for ubatch, inputs in enumerate(halves):
        runner.capture(split, Toy(), inputs, ubatch)
    assert list(runner.captured) == [GraphKey(PIECEWISE, BatchDescriptor(8), True)]
    buffers.fill(*range(1, 9))
    for ubatch, inputs in enumerate(halves):
        expected = Toy()(inputs, EAGER_SEGMENTS)
        assert torch.equal(first(runner.run(split, Toy(), inputs, ubatch)), expected)
    with pytest.raises(GraphNotCaptured):
        runner.run(plan(PIECEWISE, 8), Toy(), buffers.inputs(8))


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_only_captured_keys_are_replayed(mode: CUDAGraphMode, runner: ClosureGraphRunner, buffers: Buffers) -> None:
    with pytest.raises(GraphNotCaptured, match=r"num_tokens=4.*not captured; capture it first"):
        runner.run(plan(mode), Toy(), buffers.inputs())
    captured(runner, buffers, mode)
    with pytest.raises(GraphNotCaptured, match="num_tokens=2"):
        runner.run(plan(mode, 2), Toy(), buffers.inputs(2))
    keys = runner.captured
    runner.drop("stage 'forward' was replaced")
    assert runner.captured is keys
    assert len(keys) == 0
    with pytest.raises(GraphNotCaptured, match="stage 'forward' was replaced"):
        runner.run(plan(mode), Toy(), buffers.inputs())
    captured(runner, buffers, mode)
    assert GraphKey.of(plan(mode)) in keys


def test_a_failed_capture_keeps_nothing(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    def broken(inputs: ModelInputs, segments: SegmentRunner) -> torch.Tensor:
        segments.run(0, Toy().embed, inputs.input_ids)
        raise MemoryError("no room")

    for mode in (PIECEWISE, FULL):
        with pytest.raises(MemoryError):
            runner.capture(plan(mode), broken, buffers.inputs())
    assert runner.describe().keys == ()
    assert runner.describe().static_bytes == 0


def test_a_plan_without_a_graph_is_not_captured(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    with pytest.raises(GraphError, match="mode NONE names no graph"):
        runner.capture(plan(NONE), Toy(), buffers.inputs())


@pytest.mark.parametrize(
    ("piece", "argument", "message"),
    [
        (lambda number: torch.zeros(number), 3, "takes a int"),
        (lambda tensor: tensor.tolist(), torch.zeros(2), "returned a list"),
        (lambda tensor: (tensor, 1), torch.zeros(2), "returned a int"),
    ],
)
def test_pieces_take_and_return_tensors(
    piece: Callable[[Any], Any], argument: object, message: str, runner: ClosureGraphRunner, buffers: Buffers
) -> None:
    with pytest.raises(GraphError, match=message):
        runner.capture(plan(PIECEWISE), lambda inputs, segments: segments.run(0, piece, argument), buffers.inputs())


def test_a_piece_number_is_used_once(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    def forward(inputs: ModelInputs, segments: SegmentRunner) -> torch.Tensor:
        segments.run(0, torch.neg, inputs.positions)
        return segments.run(0, torch.abs, inputs.positions)

    with pytest.raises(GraphError, match="piece 0 is run twice"):
        runner.capture(plan(PIECEWISE), forward, buffers.inputs())


def test_other_shapes_and_pieces_than_captured_are_refused(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, PIECEWISE)

    def short(inputs: ModelInputs, segments: SegmentRunner) -> torch.Tensor:
        return segments.run(1, Toy().middle, torch.zeros(1, 2), torch.zeros(1, 2))[0]

    with pytest.raises(GraphError, match=r"captured with \(4, 2\) and is called with \(1, 2\)"):
        runner.run(plan(PIECEWISE), short, buffers.inputs())
    with pytest.raises(GraphError, match="has no piece 5"):
        runner.run(plan(PIECEWISE), lambda inputs, segments: segments.run(5, torch.neg), buffers.inputs())


def test_G9_the_report_counts_static_memory(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    captured(runner, buffers, PIECEWISE)
    captured(runner, buffers, FULL)
    report = runner.describe()
    tensor_bytes = 4 * 2 * 4  # four tokens of two float32 numbers
    # Pieces: two outputs, one input and two outputs, one input and one output. The FULL graph: one output.
    assert report.static_bytes == (2 + 3 + 2 + 1) * tensor_bytes
    assert report.keys == (GraphKey.of(plan(PIECEWISE)), GraphKey.of(plan(FULL)))


def test_the_eager_runner_captures_nothing(buffers: Buffers) -> None:
    runner = EagerRunner()
    buffers.fill(1, 2, 3, 4)
    expected = Toy()(buffers.inputs(), EAGER_SEGMENTS)
    assert torch.equal(first(runner.capture(plan(FULL), Toy(), buffers.inputs())), expected)
    runner.drop("nothing to drop")
    assert runner.describe().keys == ()
    assert runner.captured.reason == "graphs are off"


# Plans


def test_full_graphs_have_plans_of_their_own() -> None:
    groups = [KVCacheGroupSpec(layers=(0,), block_size=2), KVCacheGroupSpec(layers=(1,), block_size=4)]
    cache = PlanCache(PagedCPUBackend(), groups)
    kept = cache.plans_for(plan(FULL), 0, 0)
    assert cache.plans_for(plan(FULL), 0, 0) is kept
    others = [
        cache.plans_for(plan(FULL), 0, 1),
        cache.plans_for(plan(FULL, 8), 0, 0),
        cache.plans_for(plan(NONE), 0, 0),
        cache.plans_for(plan(NONE), 1, 0),
        cache.plans_for(plan(NONE), 0, 1),
    ]
    assert len({id(other) for other in (kept, *others)}) == 6
    assert cache.plans_for(plan(PIECEWISE), 0, 0) is cache.plans_for(plan(NONE), 0, 0)
    cache.drop()
    assert cache.plans_for(plan(FULL), 0, 0) is not kept


def test_K8_a_full_graph_attends_by_the_plan_of_this_step(runner: ClosureGraphRunner, buffers: Buffers) -> None:
    """Captured with one token, replayed with ever longer contexts over block edges: its plan is made again in place."""
    group = KVCacheGroupSpec(layers=(0,), block_size=2)
    layer = AttentionLayerSpec(num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)
    caches = {"graph": torch.zeros(2, 6, 2, 1, 4), "eager": torch.zeros(2, 6, 2, 1, 4)}
    plans = {name: PlanCache(PagedCPUBackend(), [group]) for name in caches}
    blocks = torch.tensor([[3, 1, 5, 2]], dtype=torch.int32)

    def planned(name: str, mode: CUDAGraphMode, position: int) -> ForwardFunction:
        attention = plans[name].plans_for(plan(mode, 1), 0, 0)
        offsets, seq_lens = torch.tensor([0, 1]), torch.tensor([position + 1])
        attention.plan(
            AttentionBatch(
                num_reqs=1,
                num_tokens=1,
                max_query_len=1,
                max_seq_len=position + 1,
                query_start_loc=offsets,
                seq_lens=seq_lens,
                block_table=blocks,
                slot_mapping=blocks[0, position // 2 : position // 2 + 1].long() * 2 + position % 2,
                query_start_loc_host=offsets,
                seq_lens_host=seq_lens,
            )
        )

        def forward(inputs: ModelInputs, segments: SegmentRunner) -> torch.Tensor:
            hidden = torch.sin(inputs.positions[:, None, None] + torch.arange(8.0).view(1, 2, 4))
            return attention.run(hidden, hidden[:, :1], hidden[:, 1:], caches[name], layer)

        return forward

    runner.capture(plan(FULL, 1), planned("graph", FULL, 0), buffers.inputs(1))
    for position in range(7):
        buffers.positions[0] = position
        replayed = first(runner.run(plan(FULL, 1), planned("graph", FULL, position), buffers.inputs(1)))
        eager = first(runner.run(plan(NONE, 1), planned("eager", NONE, position), buffers.inputs(1)))
        assert torch.equal(replayed, eager)
    assert torch.equal(caches["graph"], caches["eager"])
