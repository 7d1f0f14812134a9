"""Runs of decode steps: what a stage keeps of the step before gives what it would make of each step alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, fields_dict
from lazy_device import LazyDevice
from twostroke.fsm import Transaction
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.build_attn import BuildAttn
from twostroke.stages.device import HostDevice
from twostroke.stages.dispatch import Dispatch, DispatchTable
from twostroke.stages.graphs import CapturedKeys, PlanCache
from twostroke.stages.input_buffers import InputBuffers
from twostroke.stages.io import CachedRequestData, SchedulerOutput
from twostroke.stages.prepare_inputs import PrepareInputs
from twostroke.stages.records import AttentionMetadata, Batch, PreparedInputs
from twostroke.stages.request_table import RequestTable
from twostroke.stages.specs import NULL_ROW, AttentionLayerSpec, KVCacheGroupSpec
from twostroke.stages.step_changes import StepLimits
from twostroke.stages.ubatch_slice import SliceUBatches
from twostroke.stages.update_states import UpdateStates

BLOCK_SIZES = (4, 8)


class SeenPlan:
    """What it is planned with, copied."""

    def __init__(self, group: KVCacheGroupSpec) -> None:
        self.block_size = group.block_size
        self.seen: dict[str, Any] = {}

    def plan(self, batch: AttentionBatch) -> None:
        names = ("query_start_loc", "seq_lens", "query_start_loc_host", "seq_lens_host", "slot_mapping")
        self.seen = {name: getattr(batch, name).tolist() for name in names}
        counts = [-(-length // self.block_size) for length in self.seen["seq_lens"]]
        tables = batch.block_table.tolist()
        self.seen["blocks"] = [table[:count] for table, count in zip(tables, counts, strict=True)]
        self.seen |= {"num_reqs": batch.num_reqs, "num_tokens": batch.num_tokens}
        self.seen |= {"lengths": (batch.max_query_len, batch.max_seq_len)}

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        raise AssertionError("nothing runs here")


class SeenBackend:
    def make_plan(self, group: KVCacheGroupSpec) -> SeenPlan:
        return SeenPlan(group)


class Stages:
    """prepare_inputs to build_attn over buffers of their own, or over those of others."""

    def __init__(self, table: RequestTable, buffers: InputBuffers | None = None) -> None:
        sizes = [block_table.block_size for block_table in table.block_tables]
        groups = [KVCacheGroupSpec(layers=(index,), block_size=size) for index, size in enumerate(sizes)]
        self.buffers = buffers or InputBuffers(
            max_tokens=32, max_reqs=4, block_tables=table.block_tables, device=table.device
        )
        self.prepare = PrepareInputs(table, self.buffers)
        self.dispatch = Dispatch(DispatchTable(cudagraph_mode="NONE", capture_sizes=(), max_num_seqs=4), CapturedKeys())
        self.slice = SliceUBatches()
        self.build = BuildAttn(table, self.buffers, PlanCache(SeenBackend(), groups))

    def __call__(self, batch: Batch) -> tuple[PreparedInputs, AttentionMetadata]:
        inputs = self.prepare(batch)
        execution = self.dispatch(batch, inputs)
        return inputs, self.build(batch, inputs, execution, self.slice(batch, execution))

    def shown(self, batch: Batch) -> dict[str, Any]:
        """Everything that a step finds in records and buffers."""
        inputs, metadata = self(batch)
        values = {name: getattr(inputs, name) for name in fields_dict(PreparedInputs) if not name.startswith("_")}
        shown = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
        plans = [plan.seen for plan in metadata.plans[0] if isinstance(plan, SeenPlan)]
        assert len(plans) == len(self.buffers.block_table)
        buffers, num_tokens = self.buffers, batch.num_tokens
        padded = [buffers.input_ids, buffers.tokens.device, *(slots.device for slots in buffers.slot_mapping)]
        tails = [tensor[..., num_tokens:].tolist() for tensor in padded] + [buffers.requests.device.tolist()]
        return shown | {"plans": plans, "slots": [slots.tolist() for slots in metadata.slot_mapping], "tails": tails}


class Ground:
    """Requests that decode, a table that knows them, and stages that serve them all the time."""

    def __init__(self, device: Any, chooser: random.Random, sizes: tuple[int, ...] = BLOCK_SIZES) -> None:
        self.sizes = sizes
        groups = [KVCacheGroupSpec(layers=(index,), block_size=size) for index, size in enumerate(sizes)]
        self.table = RequestTable(max_num_seqs=4, max_model_len=64, groups=groups, device=device)
        limits = StepLimits(
            max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_blocks=999, vocab_size=50, engine_seed=7
        )
        self.update_states = UpdateStates(self.table, limits)
        self.stages = Stages(self.table)
        self.chooser = chooser
        self.lengths: dict[str, int] = {}
        self.blocks = iter(range(1, 999))

    def new(self, build: Any, num_reqs: int) -> SchedulerOutput:
        """A step that lets requests of random lengths in, and finishes those before."""
        finished, self.lengths = set(self.lengths), {}
        news: list[Any] = []
        for index in range(num_reqs):
            prompt = [self.chooser.randrange(50) for _ in range(self.chooser.randint(1, 7))]
            name = f"r{index}-{next(self.blocks)}"
            ids = tuple([next(self.blocks) for _ in range(-(-len(prompt) // size))] for size in self.sizes)
            news.append(evolve(build.new(name, prompt), block_ids=ids))
            self.lengths[name] = len(prompt)
        counts = {new.req_id: len(new.prompt_token_ids) for new in news}
        return build.output(counts, news, finished_req_ids=finished)

    def decode(self, build: Any) -> SchedulerOutput:
        """Everybody's next token, with the blocks that this needs; now and then counted, in words, or with a rewind."""
        more: list[Any] = []
        for length in self.lengths.values():
            ids = tuple([next(self.blocks)] if length % size == 0 else [] for size in self.sizes)
            more.append(ids if any(ids) else None)
        computed = list(self.lengths.values())
        cached = CachedRequestData(req_ids=list(self.lengths), num_computed_tokens=computed, new_block_ids=more)
        if self.chooser.random() < 0.5:
            prompts = [int(self.table.num_prompt_tokens[self.table.rows[name]]) for name in self.lengths]
            outputs = [length + 1 - prompt for length, prompt in zip(computed, prompts, strict=True)]
            cached = evolve(cached, num_output_tokens=outputs)
        return build.output(dict.fromkeys(self.lengths, 1), cached=cached)

    def commit(self, batch: Batch) -> None:
        """Pretend that a token was sampled for everybody."""
        for name, row in zip(batch.req_ids, batch.rows, strict=True):
            token = torch.tensor([self.chooser.randrange(50)], dtype=torch.int32)
            known = int(self.table.num_tokens[row])
            self.table.token_ids_host[row, known] = int(token)
            self.table.token_ids[row, known] = token[0]
            self.table.num_tokens[row] += 1
            self.lengths[name] = known


DEVICES: dict[str, Callable[[], Any]] = {"host": HostDevice, "lazy": LazyDevice}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_steps_of_a_run_show_what_each_shows_alone(build: Any, device: str, seed: int) -> None:
    chooser = random.Random(seed)
    ground = Ground(DEVICES[device](), chooser)
    other = Stages(ground.table, ground.stages.buffers)
    num_in_runs = 0
    output = ground.new(build, 3)
    for _ in range(90):
        transaction = Transaction(1)
        batch = ground.update_states(output, transaction)
        what = chooser.choice(["plain"] * 12 + ["twice", "undone", "dummy", "spoilt", "foreign", "edited"])
        if what == "dummy":
            zeros = np.zeros(2, dtype=np.int64)
            ground.stages(Batch(["", ""], zeros + NULL_ROW, zeros + 2, zeros, 4))
        elif what == "spoilt":
            ground.stages.buffers.forget()
            for buffer in (ground.stages.buffers.tokens, ground.stages.buffers.requests):
                buffer.device[:] = 10**6
        elif what == "foreign":  # other stages over the same buffers, for one step
            other(batch)
        elif what == "twice":
            ground.stages(batch)
        elif what == "undone":
            ground.stages(batch)
            transaction.rollback()
            transaction = Transaction(1)
            batch = ground.update_states(output, transaction)
        elif what == "edited" and batch.run is not None:  # by a stage that holds the requests one token back
            back = evolve(batch, num_computed_tokens=np.maximum(batch.num_computed_tokens - 1, 0))
            assert back.latest_of_run() is None
            assert ground.stages.shown(back) == Stages(ground.table).shown(back)
        assert ground.stages.shown(batch) == Stages(ground.table).shown(evolve(batch, run=None)), what
        num_in_runs += batch.run is not None and batch.run.num_steps_before > 0
        ground.commit(batch)
        transaction.commit()
        full = max(ground.lengths.values()) >= 60
        output = ground.new(build, chooser.randint(1, 4)) if full or chooser.random() < 0.05 else ground.decode(build)
    assert num_in_runs > 30, "most steps belong to a run"


def test_records_are_shared_and_only_what_differs_is_written(build: Any) -> None:
    ground = Ground(HostDevice(), random.Random(0), sizes=(4, 4))
    records: list[tuple[PreparedInputs, AttentionMetadata]] = []
    output = ground.new(build, 3)
    for _ in range(12):
        transaction = Transaction(1)
        batch = ground.update_states(output, transaction)
        records.append(ground.stages(batch))
        ground.commit(batch)
        transaction.commit()
        output = ground.decode(build)
    for shared in zip(*records[2:], strict=True):
        assert len({id(record) for record in shared}) == 1, "though blocks came in between"
    assert records[0][0] is not records[2][0]


def test_two_stages_over_the_same_buffers_do_not_add_up(build: Any) -> None:
    """As where a candidate runs beside the real stage in every step."""
    ground = Ground(HostDevice(), random.Random(0))
    beside = Stages(ground.table, ground.stages.buffers)
    output = ground.new(build, 3)
    for _ in range(20):
        transaction = Transaction(1)
        batch = ground.update_states(output, transaction)
        inputs, _ = ground.stages(batch)
        execution = beside.dispatch(batch, inputs)
        beside.build(batch, inputs, execution, beside.slice(batch, execution))
        alone = Stages(ground.table)
        assert inputs.positions.tolist() == alone(evolve(batch, run=None))[0].positions.tolist()
        for slots, expected in zip(ground.stages.buffers.slot_mapping, alone.buffers.slot_mapping, strict=True):
            assert slots.device.tolist() == expected.device.tolist()
        ground.commit(batch)
        transaction.commit()
        output = ground.decode(build)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_more_tokens_than_its_run_has_is_made_anew(build: Any, device: str) -> None:
    """As by a stage that adds a drafted token to each request, in some steps."""
    ground = Ground(DEVICES[device](), random.Random(0), sizes=(8,))
    output, num_edited = ground.new(build, 3), 0
    for index in range(24):
        transaction = Transaction(1)
        batch = ground.update_states(output, transaction)
        has_room = (batch.num_computed_tokens % 8 < 7).all()
        if index % 3 and has_room and batch.run is not None:
            more = evolve(batch, num_scheduled_tokens=batch.num_scheduled_tokens + 1, num_tokens=2 * batch.num_reqs)
            assert ground.stages.shown(more) == Stages(ground.table).shown(evolve(more, run=None))
            num_edited += batch.run.num_steps_before > 0
        assert ground.stages.shown(batch) == Stages(ground.table).shown(evolve(batch, run=None))
        ground.commit(batch)
        transaction.commit()
        output = ground.decode(build)
    assert num_edited > 5
