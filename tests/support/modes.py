"""Limits of the tiny runners, the modes that must not change a token, and one request for each kind of sampling."""

from __future__ import annotations

from typing import Any

from driver import GREEDY
from twostroke.stages.sampling_params import SamplingParams

LIMITS: dict[str, Any] = {
    "async_scheduling": False,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 24,
    "block_size": 4,
    "num_kv_blocks": 40,
}
SIZES = (1, 2, 4, 8, 16)
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "full": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": (4, 8, 16)},
    "full_decode_only": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": (4,)},
    "piecewise": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": (5, 16)},
    "full_and_piecewise": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": SIZES},
    "two_ubatches": {"num_ubatches": 2, "ubatch_decode_threshold": 2, "ubatch_prefill_threshold": 2},
    "three_ubatches_piecewise": {
        "num_ubatches": 3,
        "ubatch_decode_threshold": 2,
        "ubatch_prefill_threshold": 2,
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": SIZES,
    },
    "block_size_2": {"block_size": 2, "num_kv_blocks": 80},
    "block_size_7": {"block_size": 7, "num_kv_blocks": 40},
}

PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, seed=5, logprobs=1),
    "unseeded": SamplingParams(temperature=0.9, top_k=9, top_p=0.9, logprobs=1),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3, logprobs=3
    ),
    "prompt_logprobs": SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=2),
    "masked": SamplingParams(temperature=0.7, seed=2, min_p=0.05, allowed_token_ids=range(3, 30), logprobs=1),
    "biased": SamplingParams(
        temperature=0.0, logit_bias={7: 3.0, 9: -2.0}, bad_words_token_ids=[[7], [9, 3]], logprobs=1
    ),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[3, 40, 45], logprobs=1),
}
