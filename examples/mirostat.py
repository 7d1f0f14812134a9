"""Mirostat: hold the surprise of a text at a target, in bits a token. A stage with state of its own for each request.

    python examples/mirostat.py

Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (arXiv:2007.14966), in
the form that cuts at the surprise mu itself: tokens above it are hidden, then mu moves against the error.
"""

from math import log
from statistics import mean
from weakref import WeakKeyDictionary

import torch
from attrs import evolve
from twostroke.engine import LLM, SamplingParams
from twostroke.engine.assembly import Assembly
from twostroke.fsm import Transaction
from twostroke.stages.columns import NumberColumn
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput
from twostroke.stages.request_table import RequestRecord


class Mirostat(NumberColumn):
    """Stage, and the column of its targets. mu is kept by request: one that is preempted gets another row."""

    def __init__(self, parts: Assembly, rate: float = 0.2) -> None:
        super().__init__("surprise", parts.table.num_rows, default=3.0, low=0.1, high=20)
        self.sample, self.records, self.rate = parts.stages["sample"], parts.table.records, rate
        self.mu, self.surprises = WeakKeyDictionary[RequestRecord, float](), list[float]()

    def add(self, row: int, request: RequestRecord) -> None:
        super().add(row, request)
        self.mu.setdefault(request, 2.0 * self.values[row])

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, transaction: Transaction
    ) -> SamplerOutput:
        kept, bits = state.logits.clone(), state.logits.log_softmax(1) / -log(2)
        requests = [self.records[batch.req_ids[int(index)]] for index in inputs.sampling_reqs]
        for row, request in zip(inputs.sampling_logits, requests, strict=True):
            kept[row, bits[row] > bits[row].min().clamp(min=self.mu[request])] = -torch.inf
        output: SamplerOutput = self.sample(batch, inputs, evolve(state, logits=kept), None)
        for row, token, request in zip(inputs.sampling_logits, output.sampled_token_ids, requests, strict=True):
            self.surprises.append(float(bits[row, token]))
            transaction.on_undo(self.mu.__setitem__, request, self.mu[request])
            self.mu[request] -= self.rate * (self.surprises[-1] - float(self.values[request.row]))
        return output


if __name__ == "__main__":
    with LLM("smollm2", device="cpu") as llm:
        mirostat = Mirostat(llm.runner.parts)
        llm.runner.add_column(mirostat)
        llm.runner.stages.replace("sample", mirostat)
        for target in (1.0, 4.0):
            mirostat.surprises.clear()
            params = SamplingParams(max_tokens=24, seed=1, extra={"surprise": target})
            (result,) = llm.generate("Once upon a time", params)
            print(f"asked {target}, got {mean(mirostat.surprises):.1f} bits a token: {result.text!r}")
