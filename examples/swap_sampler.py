"""Two samplers from papers in the place of the sample stage, with parameters: python examples/swap_sampler.py

Top-nσ (Tang et al. 2024, arXiv:2411.07641) keeps logits within n standard deviations of the largest. Min-k (Ding et al.
2026, arXiv:2604.11012) cuts sorted logits at the steepest fall, weighted by 1 / log2(1 + rank) here, from rank k on.
Compare: twostroke ab --stage sample=examples/swap_sampler.py:TopNSigma --extra top_n_sigma=1.0
"""

from functools import partial

import torch
from twostroke.engine import LLM, SamplingParams
from twostroke.engine.assembly import Assembly
from twostroke.stages.columns import NumberColumn
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput


class TopNSigma(NumberColumn):
    """Column of the parameter, and stage: hides small logits from the sampler before it. 0 hides none."""

    NAME, OFF = "top_n_sigma", 0.0

    def __init__(self, parts: Assembly) -> None:
        super().__init__(self.NAME, parts.table.num_rows, default=self.OFF, low=0)
        self.sample = parts.stages["sample"]
        parts.table.add_column(self)

    @classmethod
    def from_runner(cls, parts: Assembly) -> "TopNSigma":
        return cls(parts)

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        values = torch.from_numpy(self.values[batch.rows[inputs.sampling_reqs]])
        rows, kept = torch.from_numpy(inputs.sampling_logits), state.logits.clone()
        floors = torch.where(values > 0, self.floors(kept[rows], values), -torch.inf)
        kept[rows] = kept[rows].masked_fill(kept[rows] < floors[:, None], -torch.inf)
        return self.sample(batch, inputs, ExecuteModelState(kept, state.hidden_states), grammar)

    def floors(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (logits.amax(1) - values * logits.std(1)).float()


class MinKSampler(TopNSigma):
    NAME, OFF = "min_k", 0

    def floors(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        largest, rank = logits.topk(min(256, logits.shape[1])).values, torch.arange(1, min(256, logits.shape[1]))
        fall = (largest[:, :-1] - largest[:, 1:]) / torch.log2(1 + rank)
        return largest.gather(1, fall.masked_fill(rank < values[:, None], -torch.inf).argmax(1)[:, None])[:, 0]


if __name__ == "__main__":
    with LLM("smollm2", device="cpu") as llm:
        stages = {kind.NAME: kind(llm.runner.parts) for kind in (TopNSigma, MinKSampler)}
        for name, value in (("top_n_sigma", 0.0), ("top_n_sigma", 1.0), ("min_k", 2)):
            llm.loop.between_steps(partial(llm.runner.stages.replace, "sample", stages[name]))
            params = SamplingParams(temperature=1.8, max_tokens=16, seed=1, extra={name: value})
            print(f"{name}={value}: {llm.generate('The best thing about autumn is', params)[0].text!r}")
