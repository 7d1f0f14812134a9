"""Another padding ladder: graphs of Fibonacci sizes instead of powers of two: python examples/custom_dispatch.py

A dispatch stage looks at the batch and says which graph runs it, padded to what. This one takes the smallest graph that
fits, and counts how much of what was computed was padding.
"""

from twostroke.engine import EngineConfig, SamplingParams, ServingLoop, build_runner
from twostroke.engine.models import random_model, tiny_config
from twostroke.stages.graphs import CapturedKeys
from twostroke.stages.records import Batch, BatchExecutionDescriptor, CUDAGraphMode, PreparedInputs

LADDERS = {"powers of two": (1, 2, 4, 8, 16, 32, 64), "Fibonacci": (1, 2, 3, 5, 8, 13, 21, 34, 55)}


class LadderDispatch:
    """Pads to the next size that was captured; a batch larger than all runs without a graph."""

    def __init__(self, captured: CapturedKeys) -> None:
        self.captured = captured
        self.num_real = self.num_padded = 0

    def __call__(self, batch: Batch, inputs: PreparedInputs) -> BatchExecutionDescriptor:
        keys = [key for key in self.captured if key.descriptor.num_tokens >= batch.num_tokens]
        best = min(keys, key=lambda key: key.descriptor.num_tokens, default=None)
        size = batch.num_tokens if best is None else best.descriptor.num_tokens
        self.num_real, self.num_padded = self.num_real + batch.num_tokens, self.num_padded + size
        return BatchExecutionDescriptor(
            mode=CUDAGraphMode.NONE if best is None else CUDAGraphMode.PIECEWISE,
            num_tokens=size,
            num_reqs=batch.num_reqs,
            descriptor=None if best is None else best.descriptor,
            reason="too large" if best is None else "least padding",
        )


if __name__ == "__main__":
    for name, sizes in LADDERS.items():
        config = EngineConfig(
            device="cpu",
            max_num_seqs=32,
            max_num_batched_tokens=64,
            num_kv_blocks=512,
            cudagraph_mode="PIECEWISE",
            cudagraph_capture_sizes=sizes,
        )
        runner = build_runner(config, model=random_model(tiny_config()))
        dispatch = LadderDispatch(runner.parts.graphs.captured)
        runner.stages.replace("dispatch", dispatch)  # graphs stay: none depends on who chooses it
        with ServingLoop(runner) as loop:
            params = [SamplingParams(max_tokens=1 + 2 * index, temperature=0) for index in range(32)]
            handles = [loop.add([1 + index, 2, 3], own) for index, own in enumerate(params)]
            tokens = [handle.result().outputs[0].token_ids for handle in handles]
        waste = 1 - dispatch.num_real / dispatch.num_padded
        print(f"{name}: {len(runner.parts.graphs.captured)} graphs, {waste:.1%} of the computed tokens were padding")
