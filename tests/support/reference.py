"""What a request must get: the same request served alone by an eager runner, once for each kind of wish."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from driver import Served, Wish, serve_alone
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import build_runner
from twostroke.stages.forward_context import Model
from twostroke.stages.io import GrammarOutput
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput
from twostroke.stages.sample import Sample
from twostroke.stages.sampling_params import SamplingParams

MAX_OUTPUTS = 7
NOISE = 1e-3
KINDS: dict[str, SamplingParams] = {
    **PARAMS,
    "hot": SamplingParams(temperature=1.5, min_p=0.02, presence_penalty=0.5, logprobs=2),
    "prompt_and_seed": SamplingParams(temperature=0.8, seed=11, logprobs=1, prompt_logprobs=1),
    "all_at_once": SamplingParams(
        temperature=0.6,
        seed=3,
        top_k=20,
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        min_tokens=3,
        stop_token_ids=[1, 2, 5],
        bad_words_token_ids=[[4], [8, 9]],
        logit_bias={6: 1.5},
        logprobs=4,
    ),
    "quiet": SamplingParams(temperature=0.0),
}


class _Shaken:
    """The sample stage of a reference; notes when other last bits of the logits would give another token."""

    def __init__(self, inner: Sample, vocab_size: int) -> None:
        self._inner = inner
        signs = torch.randn(vocab_size, generator=torch.Generator().manual_seed(7)).sign()
        self._noises = (NOISE * signs, -NOISE * signs)
        self.is_fragile = False

    def __call__(
        self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        output = self._inner(batch, inputs, state, grammar)
        for noise in self._noises:
            shaken = self._inner(batch, inputs, ExecuteModelState(state.logits + noise), grammar)
            self.is_fragile |= not torch.equal(shaken.sampled_token_ids, output.sampled_token_ids)
        return output


class References:
    """Serves wishes alone and remembers what they got.

    Sums in another order may change the last bits of a logit. So that equal tokens can be asked for, a wish whose
    tokens would change with its logits (by :data:`NOISE`, this way or the opposite one) is not used: ``serve`` gives
    None.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._runner = build_runner(EngineConfig(**LIMITS), model=model)
        sample = self._runner.stages["sample"]
        assert isinstance(sample, Sample)
        self._sample = _Shaken(sample, model.spec.vocab_size)
        self._runner.stages.replace("sample", self._sample)
        self._served: dict[tuple[str, tuple[int, ...], str], Served | None] = {}

    def serve(self, req_id: str, kind: str, prompt: Sequence[int]) -> Served | None:
        """:data:`MAX_OUTPUTS` tokens for ``KINDS[kind]``, or None if they hang on the last bits."""
        params = KINDS[kind]
        depends_on_id = params.seed is None and not params.is_greedy
        key = (kind, tuple(prompt), req_id if depends_on_id else "")
        if key not in self._served:
            self._sample.is_fragile = False
            served = serve_alone(self._runner, Wish(req_id, tuple(prompt), MAX_OUTPUTS, params))
            self._served[key] = None if self._sample.is_fragile else served
        return self._served[key]
