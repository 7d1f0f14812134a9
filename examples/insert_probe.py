"""Look at a step from inside, with a record of one's own between two stages: python examples/insert_probe.py

The first stage gives a record that did not exist before, the second takes it: their annotations are the wiring.
"""

import torch
from attrs import frozen
from twostroke.engine import LLM, SamplingParams
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput


@frozen(eq=False)
class Certainty:
    """``entropy`` float32 ``[num_sampling]``: how open the choice of each request's next token is, in bits."""

    entropy: torch.Tensor


def measure(inputs: PreparedInputs, state: ExecuteModelState) -> Certainty:
    """Entropy of the next token, before anything is done to the logits."""
    log_p = state.logits[torch.from_numpy(inputs.sampling_logits)].log_softmax(1)
    return Certainty(-(log_p.exp() * log_p).sum(1) / torch.tensor(2.0).log())


def show(batch: Batch, inputs: PreparedInputs, certainty: Certainty, output: SamplerOutput) -> None:
    """One line a step."""
    requests = [batch.req_ids[index] for index in inputs.sampling_reqs]
    bits, tokens = certainty.entropy.tolist(), output.sampled_token_ids.tolist()
    print(
        "; ".join(f"{req_id}: {b:4.1f} bits → {token}" for req_id, b, token in zip(requests, bits, tokens, strict=True))
    )


if __name__ == "__main__":
    with LLM("smollm2", device="cpu") as llm:
        with llm.runner.stages.restored() as stages:
            stages.insert(measure, after="forward")
            stages.insert(show, after="sample")
            print(stages.describe(), end="\n\n")
            prompts = ["The capital of France is", "My favourite word is"]
            results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
            llm.loop.stop()  # stages can be restored once no step is under way
        for result in results:
            print(f"{result.prompt}{result.text}")
