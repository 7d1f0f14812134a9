"""dispatch: decide how the batch runs: eagerly or through which graph, padded to what, whole or in micro-batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attrs import evolve, field, frozen

from ..fsm.errors import TwoStrokeError
from .coordinator import DataParallelCoordinator, DispatchAgreement, DispatchVote, SoloCoordinator
from .graphs import CapturedKeys, GraphError, GraphKey, full_graph_rows
from .records import Batch, BatchDescriptor, BatchExecutionDescriptor, CUDAGraphMode, PreparedInputs
from .ubatch_slice import splits_evenly

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL

# Reasons are constant texts: fallbacks are counted by them.
BEST = "best configured"
OFF = "graphs are off"
NOT_UNIFORM = "not a uniform batch"
TOO_LARGE = "more tokens than the largest graph"
NO_LORA = "graphs were captured without LoRA"
FULL_REFUSED = "FULL is not allowed"
OTHER_LOGITS = "needs logits that a FULL graph does not compute"
UBATCHED = "micro-batched"
OTHER_RANKS = "another data-parallel rank needs a lower mode"
TOO_MANY_REQUESTS = "more requests than the graph holds"


class DispatchDisagreement(TwoStrokeError, RuntimeError):
    """This rank cannot run what the data-parallel ranks agreed on: their graphs differ. Capture the same on all."""


class Ladder(NamedTuple):
    """Graphs of one kind, by ascending size in tokens. A uniform ladder serves batches of equal query lengths only."""

    mode: CUDAGraphMode
    uniform: bool
    sizes: tuple[int, ...]


def _ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({int(size) for size in sizes if size > 0}))


@frozen(kw_only=True)
class DispatchTable:
    """Which graphs there are to be, and which of them a batch would use. Pure: it knows no batch and no captures.

    ``cudagraph_mode`` is NONE, PIECEWISE, FULL (one FULL ladder for every batch), FULL_DECODE_ONLY (FULL for uniform
    batches) or FULL_AND_PIECEWISE (FULL for uniform batches, PIECEWISE for others). ``capture_sizes`` are in tokens.
    ``uniform_query_len`` is 1 + draft tokens. With ``lora`` each graph exists twice.

    Sizes of a uniform ladder are whole requests, at most ``max_num_seqs`` of them: each capture size is rounded up, the
    last ones down to stay within the largest capture size. So every uniform batch up to there finds a FULL graph.

    Raises:
        GraphError: an unknown ``cudagraph_mode``.
    """

    cudagraph_mode: str
    capture_sizes: tuple[int, ...] = field(converter=_ascending)
    max_num_seqs: int
    uniform_query_len: int = 1
    lora: bool = False
    ladders: tuple[Ladder, ...] = field(init=False, eq=False, repr=False)
    """Best mode first."""

    def __attrs_post_init__(self) -> None:
        """Lay out the ladders."""
        object.__setattr__(self, "ladders", self._make_ladders())

    def _make_ladders(self) -> tuple[Ladder, ...]:
        piecewise = Ladder(PIECEWISE, False, self.capture_sizes)
        uniform = Ladder(FULL, True, self._uniform_sizes())
        ladders = {
            "NONE": (),
            "PIECEWISE": (piecewise,),
            "FULL": (Ladder(FULL, False, self.capture_sizes),),
            "FULL_DECODE_ONLY": (uniform,),
            "FULL_AND_PIECEWISE": (uniform, piecewise),
        }
        if self.cudagraph_mode not in ladders:
            raise GraphError(f"cudagraph_mode {self.cudagraph_mode!r} is not one of {', '.join(ladders)}")
        return ladders[self.cudagraph_mode]

    def _uniform_sizes(self) -> tuple[int, ...]:
        length, largest = self.uniform_query_len, self.capture_sizes[-1] if self.capture_sizes else 0
        num_reqs = (min(-(-size // length), largest // length, self.max_num_seqs) for size in self.capture_sizes)
        return _ascending(count * length for count in num_reqs)

    @property
    def has_mixed_full(self) -> bool:
        """Whether FULL graphs serve any batch, and so compute logits of the last token of each request only."""
        return any(ladder.mode is FULL and not ladder.uniform for ladder in self.ladders)

    def key(self, ladder: Ladder, size: int, has_lora: bool) -> BatchDescriptor:
        """The key of a graph: the same function for what is captured and for what is looked up."""
        if ladder.mode is PIECEWISE:
            return BatchDescriptor(size, has_lora=has_lora)
        num_reqs = size // self.uniform_query_len if ladder.uniform else min(size, self.max_num_seqs)
        return BatchDescriptor(size, num_reqs, ladder.uniform, has_lora)

    def lookup(
        self, num_tokens: int, *, uniform: bool, has_lora: bool = False, allow_full: bool = True
    ) -> tuple[CUDAGraphMode, BatchDescriptor | None, str]:
        """The highest mode that serves the batch, its graph of least padding, and why no higher mode does."""
        if has_lora and not self.lora:
            return NONE, None, NO_LORA
        reason = BEST if self.ladders else OFF
        for ladder in self.ladders:
            index = bisect_left(ladder.sizes, num_tokens)
            if ladder.uniform and not uniform:
                reason = NOT_UNIFORM
            elif ladder.mode is FULL and not allow_full:
                reason = FULL_REFUSED
            elif index == len(ladder.sizes):
                reason = TOO_LARGE
            else:
                return ladder.mode, self.key(ladder, ladder.sizes[index], has_lora), reason
        return NONE, None, reason

    def capture_order(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """All keys, PIECEWISE before FULL, largest first: later graphs then fit into the memory of earlier ones."""
        variants = (True, False) if self.lora else (False,)
        return [
            (ladder.mode, [self.key(ladder, size, lora) for size in reversed(ladder.sizes) for lora in variants])
            for ladder in reversed(self.ladders)
        ]


@frozen(kw_only=True)
class UBatchPolicy:
    """When a batch is worth splitting into ``num_ubatches``. Thresholds are in scheduled tokens, inclusive."""

    num_ubatches: int = 1
    decode_threshold: int = 32
    prefill_threshold: int = 512

    def wants(self, *, num_tokens: int, uniform_decode: bool) -> bool:
        """Whether a batch of this size should be split; never when a micro-batch would get no token."""
        threshold = self.decode_threshold if uniform_decode else self.prefill_threshold
        return self.num_ubatches > 1 and num_tokens >= max(threshold, self.num_ubatches)


class _Need(NamedTuple):
    """What a batch asks of a plan. ``full_refusal`` says why no FULL graph can serve it."""

    num_reqs: int = 1
    uniform: bool = True
    has_lora: bool = False
    eager_reason: str | None = None
    full_refusal: str | None = None


class _Chosen(NamedTuple):
    """What this rank alone would do, and its vote; good for steps that need the same while ``version`` stays."""

    need: _Need
    num_tokens: int
    version: int
    plan: BatchExecutionDescriptor
    vote: DispatchVote


class Dispatch:
    """The stage. A mode counts only once its graph was captured; fallbacks are counted in ``counts``.

    Args:
        table: the graphs that are to be.
        captured: the graphs that exist; the graph runner's own object.
        coordinator: asked exactly once a step.
        ubatching: when to split.
    """

    def __init__(
        self,
        table: DispatchTable,
        captured: CapturedKeys,
        coordinator: DataParallelCoordinator | None = None,
        ubatching: UBatchPolicy | None = None,
    ) -> None:
        self.table = table
        self.counts: Counter[tuple[CUDAGraphMode, str]] = Counter()
        self._captured = captured
        self._coordinator = coordinator or SoloCoordinator()
        self._ubatching = ubatching or UBatchPolicy()
        self._has_mixed_full = table.has_mixed_full
        self._chosen: _Chosen | None = None

    def __call__(self, batch: Batch, inputs: PreparedInputs) -> BatchExecutionDescriptor:
        """The plan of this step, agreed with the other data-parallel ranks.

        Raises:
            DispatchDisagreement: the ranks captured different graphs.
        """
        num_tokens, length = batch.num_tokens, self.table.uniform_query_len
        uniform = inputs.max_query_len == length and num_tokens == length * batch.num_reqs
        need = _Need(batch.num_reqs, uniform, batch.has_lora, batch.eager_reason, self._full_refusal(inputs))
        chosen = self._chosen
        if chosen is None or chosen[:3] != (need, num_tokens, self._captured.version):
            chosen = self._chosen = self._choose_alone(need, num_tokens)
        plan = chosen.plan
        agreement = self._coordinator.agree(chosen.vote)
        if len(agreement.num_tokens_across_dp) > 1:
            plan = self._follow(agreement, need, num_tokens)
        self.counts[plan.mode, plan.reason] += 1
        return plan

    def idle_step(self) -> BatchExecutionDescriptor | None:
        """Take part in the agreement of a step without tokens.

        Returns:
            The plan of the dummy that keeps this rank in step, or None when no rank has work.
        """
        mode = FULL if len(self._captured) else NONE
        split = self._ubatching.num_ubatches > 1
        agreement = self._coordinator.agree(
            DispatchVote(num_scheduled_tokens=0, num_tokens=0, should_ubatch=split, mode=mode)
        )
        if not any(agreement.num_tokens_across_dp):
            return None
        plan = self._follow(agreement, _Need(), 1)
        if plan.mode is not FULL:
            plan = evolve(plan, num_reqs=min(plan.num_tokens, self.table.max_num_seqs))
        self.counts[plan.mode, plan.reason] += 1
        return plan

    def capture_plans(self) -> Iterator[BatchExecutionDescriptor]:
        """A plan for each graph that some batch can use, in order of capture: give each to :class:`FixedDispatch`."""
        policy = self._ubatching
        threshold = max(policy.num_ubatches, min(policy.decode_threshold, policy.prefill_threshold))
        for mode, keys in self.table.capture_order():
            for key in keys:
                num_reqs = key.num_reqs or min(key.num_tokens, self.table.max_num_seqs)
                plan = BatchExecutionDescriptor(
                    mode=mode, num_tokens=key.num_tokens, num_reqs=num_reqs, descriptor=key, reason="capture"
                )
                yield plan
                if mode is PIECEWISE and policy.num_ubatches > 1 and key.num_tokens >= threshold:
                    yield evolve(plan, should_ubatch=True)

    def _choose_alone(self, need: _Need, num_tokens: int) -> _Chosen:
        version = self._captured.version
        split = self._ubatching.wants(num_tokens=num_tokens, uniform_decode=need.uniform)
        plan = self._choose(need, num_tokens, FULL, split)
        if split and not self._splits(num_tokens, plan.num_tokens):
            plan = self._choose(need, num_tokens, FULL, False)
        vote = DispatchVote(
            num_scheduled_tokens=num_tokens,
            num_tokens=plan.num_tokens,
            should_ubatch=plan.should_ubatch,
            mode=plan.mode,
        )
        return _Chosen(need, num_tokens, version, plan, vote)

    def _full_refusal(self, inputs: PreparedInputs) -> str | None:
        if self._has_mixed_full and full_graph_rows(inputs, BatchDescriptor(len(inputs.positions))) is None:
            return OTHER_LOGITS
        return None

    def _splits(self, num_tokens: int, num_tokens_padded: int) -> bool:
        return splits_evenly(num_tokens, num_tokens_padded, self._ubatching.num_ubatches)

    def _choose(self, need: _Need, num_tokens: int, ceiling: CUDAGraphMode, split: bool) -> BatchExecutionDescriptor:
        """The best plan for ``num_tokens`` that is not above ``ceiling``."""
        full_refusal = UBATCHED if split else need.full_refusal or (OTHER_RANKS if ceiling is not FULL else None)
        mode, key, reason = self.table.lookup(
            num_tokens, uniform=need.uniform, has_lora=need.has_lora, allow_full=full_refusal is None
        )
        if reason == FULL_REFUSED and full_refusal is not None:
            reason = full_refusal
        refusal = need.eager_reason
        if refusal is None and key is not None:
            if ceiling is NONE:
                refusal = OTHER_RANKS
            elif GraphKey(mode, key, split) not in self._captured:
                refusal = self._captured.reason
            elif key.num_reqs is not None and need.num_reqs > key.num_reqs:
                refusal = TOO_MANY_REQUESTS
        if refusal is not None:
            mode, key, reason = NONE, None, refusal
        return BatchExecutionDescriptor(
            mode=mode,
            num_tokens=num_tokens if key is None else key.num_tokens,
            num_reqs=need.num_reqs if key is None or key.num_reqs is None else key.num_reqs,
            descriptor=key,
            should_ubatch=split,
            reason=reason,
        )

    def _follow(self, agreement: DispatchAgreement, need: _Need, num_tokens: int) -> BatchExecutionDescriptor:
        """The plan that all ranks run. A pure function of the agreement but for this rank's own requests.

        Ranks pad to one size where graphs or micro-batches must have the same shape; eager ranks keep their own sizes.
        """
        scheduled = agreement.num_tokens_across_dp
        # An idle rank fills whatever size is agreed, so it never has an empty micro-batch.
        split = agreement.should_ubatch and all(
            self._splits(count or agreement.num_tokens, agreement.num_tokens) for count in scheduled
        )
        common = split or agreement.mode is not NONE
        plan = self._choose(need, agreement.num_tokens if common else num_tokens, agreement.mode, split)
        if plan.mode is not agreement.mode:
            raise DispatchDisagreement(
                f"the data-parallel ranks agreed on {agreement.mode.name} with {agreement.num_tokens} tokens, but here "
                f"it is {plan.mode.name} ({plan.reason}); capture the same graphs on every rank"
            )
        sizes = (plan.num_tokens,) * len(scheduled) if common else tuple(max(1, count) for count in scheduled)
        return evolve(plan, num_tokens_across_dp=sizes)


class FixedDispatch:
    """Dispatch for profile, dummy and capture runs: always the given plan, whatever was captured."""

    def __init__(self, execution: BatchExecutionDescriptor) -> None:
        self._execution = execution

    def __call__(self, batch: Batch, inputs: PreparedInputs) -> BatchExecutionDescriptor:
        """The given plan.

        Raises:
            GraphError: the batch is larger than the plan.
        """
        plan = self._execution
        if batch.num_tokens > plan.num_tokens or batch.num_reqs > plan.num_reqs:
            raise GraphError(
                f"a batch of {batch.num_tokens} tokens and {batch.num_reqs} requests does not fit the fixed plan of "
                f"{plan.num_tokens} tokens and {plan.num_reqs} requests"
            )
        return plan
