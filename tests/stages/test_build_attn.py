"""build_attn: slots, block tables and lengths, whole and cut into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import evolve
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.build_attn import BuildAttn
from twostroke.stages.device import HostDevice
from twostroke.stages.graphs import PlanCache
from twostroke.stages.input_buffers import InputBuffers
from twostroke.stages.prepare_inputs import PrepareInputs
from twostroke.stages.records import Batch, BatchDescriptor, BatchExecutionDescriptor, CUDAGraphMode
from twostroke.stages.specs import NULL_ROW, AttentionLayerSpec, KVCacheGroupSpec
from twostroke.stages.ubatch_slice import SliceUBatches


class RecordingPlan:
    """Keeps the batch that it was planned with."""

    def __init__(self, group: KVCacheGroupSpec) -> None:
        self.group = group
        self.batches: list[AttentionBatch] = []

    def plan(self, batch: AttentionBatch) -> None:
        self.batches.append(batch)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        layer: AttentionLayerSpec,
    ) -> torch.Tensor:
        raise AssertionError("nothing runs here")


class RecordingBackend:
    def make_plan(self, group: KVCacheGroupSpec) -> RecordingPlan:
        return RecordingPlan(group)


def built(kit: Any, batch: Batch, **execution: Any) -> tuple[InputBuffers, Any]:
    table = kit.table
    buffers = InputBuffers(max_tokens=32, max_reqs=4, block_tables=table.block_tables, device=HostDevice())
    for block_table in buffers.block_table:
        block_table.array[:] = 10**6
    groups = [KVCacheGroupSpec(layers=(index,), block_size=4) for index in range(len(table.block_tables))]
    values: dict[str, Any] = {"mode": CUDAGraphMode.NONE, "num_tokens": batch.num_tokens, "num_reqs": batch.num_reqs}
    plan = BatchExecutionDescriptor(**{**values, **execution})
    inputs = PrepareInputs(table, buffers)(batch)
    build_attn = BuildAttn(table, buffers, PlanCache(RecordingBackend(), groups))
    return buffers, build_attn(batch, inputs, plan, SliceUBatches(2)(batch, plan))


def test_slots_follow_the_block_table(kit: Any, build: Any) -> None:
    kit.step(build.output({"a": 5}, [build.new("a", [1] * 5, [3, 7])]), {"a": 2})
    batch = kit.step(
        build.output({"a": 1, "b": 3}, [build.new("b", [1] * 6, [9, 8], computed=3)], build.cached("a", [5]))
    )
    buffers, metadata = built(kit, batch)
    assert metadata.slot_mapping[0].tolist() == [7 * 4 + 1, 9 * 4 + 3, 8 * 4, 8 * 4 + 1]
    attention = metadata.plans[0][0].batches[0]
    assert attention.query_start_loc.tolist() == [0, 1, 4]
    assert attention.seq_lens.tolist() == [6, 6]
    assert attention.block_table[:, :2].tolist() == [[3, 7], [9, 8]]
    assert (attention.max_query_len, attention.max_seq_len) == (3, 6)
    assert buffers.slot_mapping[0].array[4:].tolist() == [-1] * 28


def test_G4_padding_holds_no_live_slot_row_or_length(kit: Any, build: Any) -> None:
    news = [build.new(req_id, [1], [block]) for req_id, block in zip("abc", (3, 4, 5), strict=True)]
    batch = kit.step(build.output(dict.fromkeys("abc", 1), news))
    key = BatchDescriptor(4, 4, uniform=True)
    _, metadata = built(kit, batch, mode=CUDAGraphMode.FULL, num_tokens=4, num_reqs=4, descriptor=key)
    attention = metadata.plans[0][0].batches[0]
    assert attention.slot_mapping.tolist() == [12, 16, 20, -1]
    assert attention.seq_lens.tolist() == [1, 1, 1, 0]
    assert attention.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert attention.block_table[3].tolist() == [0] * 4


def test_full_plans_are_kept_and_planned_again_over_the_same_memory(kit: Any, build: Any) -> None:
    batch = kit.step(build.output({"a": 1}, [build.new("a", [1], [3])]))
    buffers = InputBuffers(max_tokens=8, max_reqs=4, block_tables=kit.table.block_tables, device=HostDevice())
    cache = PlanCache(RecordingBackend(), [KVCacheGroupSpec(layers=(0,), block_size=4)])
    build_attn, prepare = BuildAttn(kit.table, buffers, cache), PrepareInputs(kit.table, buffers)
    execution = BatchExecutionDescriptor(
        mode=CUDAGraphMode.FULL, num_tokens=2, num_reqs=2, descriptor=BatchDescriptor(2, 2, uniform=True)
    )
    plans = []
    for _ in range(2):
        inputs = prepare(batch)
        plans.append(build_attn(batch, inputs, execution, SliceUBatches()(batch, execution)).plans[0][0])
    assert plans[0] is plans[1]
    first, second = plans[0].batches
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_B3_a_request_cut_by_the_border_keeps_its_positions_and_lengths(kit: Any, build: Any) -> None:
    news = [build.new("a", [1] * 3, [1]), build.new("b", [1] * 12, [2, 3, 4], computed=1)]
    batch = kit.step(build.output({"a": 3, "b": 10}, news))
    _, metadata = built(kit, batch, should_ubatch=True)
    first, second = (plans[0].batches[0] for plans in metadata.plans)
    assert first.query_start_loc.tolist() == [0, 3, 6]
    assert first.seq_lens.tolist() == [3, 4], "b sees its computed token and the three of this part"
    assert second.query_start_loc.tolist() == [0, 7]
    assert second.seq_lens.tolist() == [11]
    slots = torch.cat([first.slot_mapping, second.slot_mapping])
    assert slots.tolist() == metadata.slot_mapping[0].tolist()


def test_B1_each_group_and_micro_batch_has_its_own_metadata(make_kit: Any, build: Any) -> None:
    kit = make_kit(groups=2)
    news = [
        evolve(
            build.new(f"r{i}", [1] * length), block_ids=([1 + 3 * i, 2 + 3 * i, 3 + 3 * i], [20 + i, 24 + i, 28 + i])
        )
        for i, length in enumerate((2, 9, 3, 7))
    ]
    batch = kit.step(build.output({"r0": 2, "r1": 9, "r2": 3, "r3": 7}, news))
    _, metadata = built(kit, batch, should_ubatch=True)
    for group in range(2):
        whole = np.concatenate([plans[group].batches[0].slot_mapping.numpy() for plans in metadata.plans])
        assert whole.tolist() == metadata.slot_mapping[group].tolist()
        assert [plans[group].batches[0].seq_lens.tolist() for plans in metadata.plans] == [[2, 8], [9, 3, 7]]
    assert metadata.slot_mapping[0].tolist() != metadata.slot_mapping[1].tolist()


def test_null_rows_store_nothing(kit: Any) -> None:
    zeros = np.zeros(2, dtype=np.int64)
    _, metadata = built(kit, Batch(["", ""], zeros + NULL_ROW, zeros + 2, zeros, 4))
    assert metadata.slot_mapping[0].tolist() == [-1] * 4
