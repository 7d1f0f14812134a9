"""Real text: what Hugging Face transformers gives for five prompts, through the serving loop, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twostroke.engine import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

NEAR_TIE = 0.01


@pytest.fixture(scope="module")
def golden(data_path: Path) -> list[dict[str, Any]]:
    return json.loads((data_path / "golden_smollm2_fp32.json").read_text())["cases"]


@pytest.fixture(scope="module")
def results(golden: list[dict[str, Any]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=5, skip_special_tokens=False)
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 * 2**20) as llm:
        return llm.generate([case["prompt"] for case in golden], params)


@pytest.mark.parametrize("index", range(5))
def test_same_ids_texts_and_logprobs(golden: list[dict[str, Any]], results: list[RequestOutput], index: int) -> None:
    case, result = golden[index], results[index]
    assert list(result.prompt_token_ids) == case["prompt_token_ids"]
    completion = result.outputs[0]
    ids, expected = list(completion.token_ids), case["output_token_ids"]
    differs = next((i for i, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1]), None)
    if differs is not None:
        assert case["top1_top2_gaps"][differs] <= NEAR_TIE, f"token {differs} is no near tie"
    else:
        assert completion.text == case["text"]
    assert completion.logprobs is not None
    for token, logprob in case["first_step_top5_logprobs"]:
        np.testing.assert_allclose(completion.logprobs[0][token].logprob, logprob, atol=1e-3)
