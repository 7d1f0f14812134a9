"""Try another attention backend on the batches that really come, without trusting it.

    python examples/shadow_attention.py

A second build_attn runs beside the real one. Both plans attend to the same random queries, keys and values over a copy
of the cache, and are compared; the step goes on with the real plan. Then the same with a backend that has a fault.
"""

import torch
from attrs import evolve
from twostroke.engine import EngineConfig, ModelRunner, SamplingParams, ServingLoop, build_runner
from twostroke.engine.attention.invariant_cpu import InvariantCPUBackend, InvariantCPUPlan
from twostroke.engine.models import random_model, tiny_config
from twostroke.engine.shadow import shadow
from twostroke.engine.shadow_compare import Compare, within
from twostroke.stages.attention import AttentionBatch
from twostroke.stages.build_attn import BuildAttn
from twostroke.stages.graphs import PlanCache
from twostroke.stages.records import AttentionMetadata
from twostroke.stages.specs import KVCacheGroupSpec


class NeighbourPlan(InvariantCPUPlan):
    """Reads the blocks of the request next to it: right as long as there is only one."""

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(evolve(batch, block_table=batch.block_table.roll(1, 0)))


class NeighbourBackend(InvariantCPUBackend):
    def make_plan(self, group: KVCacheGroupSpec) -> InvariantCPUPlan:
        return NeighbourPlan(group.block_size)


def same_attention(runner: ModelRunner) -> Compare:
    """Compares what plans compute: as objects, those of two backends have nothing in common."""
    layer, cache = runner.spec.attention_layers[0], runner.parts.kv_cache.layers[0]

    def compare(real: AttentionMetadata, candidate: AttentionMetadata) -> str | None:
        noise, num_tokens = torch.Generator().manual_seed(0), len(real.slot_mapping[0])
        counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = (torch.randn(num_tokens, count, layer.head_size, generator=noise) for count in counts)
        one, two = (metadata.plans[0][0].run(q, k, v, cache.clone(), layer) for metadata in (real, candidate))
        return within(absolute=1e-5)(one, two)

    return compare


if __name__ == "__main__":
    config = EngineConfig(device="cpu", max_num_seqs=4, num_kv_blocks=64, max_model_len=128)
    runner = build_runner(config, model=random_model(tiny_config()))
    for backend in (InvariantCPUBackend(), NeighbourBackend()):
        candidate = BuildAttn(runner.parts.table, runner.parts.buffers, PlanCache(backend, runner.kv_groups))
        watch = shadow("build_attn", candidate, compare=same_attention(runner))
        with watch.beside(runner.stages), ServingLoop(runner) as loop:
            params = SamplingParams(max_tokens=12, temperature=0)
            handles = [loop.add(list(range(1, 2 + 5 * index)), params) for index in range(4)]
            print(type(backend).__name__, [len(handle.result().outputs[0].token_ids) for handle in handles])
        print(watch.summary())
