"""Steer two requests of a batch of three by adding a direction to their hidden states: python examples/steer.py

Activation addition (Turner et al. 2023, "Steering Language Models With Activation Engineering", arXiv:2308.10248): the
difference of two texts' hidden states is added at one layer, or taken away. Prompt, parameters and batch are the same
for all. Keys and values of a steered prompt are its own, so prefixes are not shared.
"""

import torch
from twostroke.engine import LLM, SamplingParams
from twostroke.engine.observe import Activation

LAYER = "layers.10.residual"
LIKE, DISLIKE = " I love this, it is wonderful", " I hate this, it is horrible"
PROMPT = "I went to the restaurant and the food was"
FACTORS = {"as it is": 0.0, "towards": 1.0, "away": -1.0}


def main() -> None:
    with LLM("smollm2", device="cpu", enable_prefix_caching=False) as llm:
        kept: dict[str, torch.Tensor] = {}

        def keep(activation: Activation) -> None:
            kept.update({req_id: activation.of(req_id)[-1].clone() for req_id in activation.req_ids})

        one = SamplingParams(max_tokens=1, temperature=0)
        with llm.runner.observe(LAYER, keep):
            for handle in [llm.loop.add(text, one, text) for text in (LIKE, DISLIKE)]:
                handle.result()
        direction = kept[LIKE] - kept[DISLIKE]

        def steer(activation: Activation) -> torch.Tensor:
            edited = activation.tensor.clone()
            for req_id in activation.req_ids:
                edited[activation.rows(req_id)] += FACTORS[req_id] * direction
            return edited

        params = SamplingParams(max_tokens=16, temperature=0, repetition_penalty=1.2)
        with llm.runner.observe(LAYER, steer, edit=True):
            for name, handle in {name: llm.loop.add(PROMPT, params, name) for name in FACTORS}.items():
                print(f"{name:>8}: {PROMPT} … {' '.join(handle.result().text.split())}")


if __name__ == "__main__":
    main()
