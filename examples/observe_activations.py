"""Read hidden states while a model serves several requests at once: python examples/observe_activations.py

A logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens"): after each layer, what would the model say next?
A hook gets the rows of every request of the step, without padding, in whatever batch, chunk or graph mode they run.
"""

from collections import defaultdict

import torch.nn.functional as F
from twostroke.engine import LLM, SamplingParams
from twostroke.engine.observe import Activation

PROMPTS = ["The capital of France is", "The opposite of hot is"]
LAYERS = (0, 6, 12, 18, 24, 27, 29)


def main() -> None:
    with LLM("smollm2", device="cpu") as llm:
        loaded = llm.runner.loaded
        assert loaded is not None
        assert loaded.tokenizer is not None
        model, tokenizer = loaded.model, loaded.tokenizer
        guesses: dict[str, list[str]] = defaultdict(list)

        def look(activation: Activation) -> None:
            for req_id in activation.req_ids:
                last = activation.of(req_id)[-1:]  # the token that the next one is predicted from
                normed = F.rms_norm(last, last.shape[1:], model.weights.norm, model.config.rms_norm_eps)
                guesses[req_id].append(tokenizer.decode(model.compute_logits(normed).argmax(dim=1).tolist()))

        handles = [llm.runner.observe(f"layers.{layer}.residual", look) for layer in LAYERS]
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0))
        for handle in handles:
            handle.close()
        for result in results:
            print(f"{result.prompt!r} goes on {result.text!r}")
            for layer, guess in zip(LAYERS, guesses[result.request_id], strict=True):
                print(f"    after layer {layer:2d} it would be {guess!r}")


if __name__ == "__main__":
    main()
