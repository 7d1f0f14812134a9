"""Hugging Face transformers on the same GPU as the oracle: greedy tokens in float32, logits in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.serving_loop import ServingLoop
from twostroke.stages.records import ExecuteModelState
from twostroke.stages.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = ([3, 41, 7, 7, 0, 25, 13, 60, 2, 19, 33, 8, 54, 1, 63, 5], [40], [11, 22, 9])
SHAPE: dict[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
ARCHITECTURES = ("Llama", "Qwen2", "Qwen3", "Mistral")


def reference(architecture: str, folder: Path, dtype: torch.dtype) -> Any:
    """A random model of transformers on the GPU, also stored in ``folder``."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**SHAPE)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder)
    return model.to("cuda").eval()


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_kv_blocks": 40}
    runner = ModelRunner(EngineConfig(model=str(folder), device="cuda", **limits | options))
    runner.load_model()
    runner.initialize_kv_cache()
    runner.capture_model()
    return runner


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_in_float32(architecture: str, tmp_path: Path) -> None:
    model = reference(architecture, tmp_path, torch.float32)
    with ServingLoop(make_runner(tmp_path, dtype="float32")) as loop:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        handles = [loop.add(list(prompt), params) for prompt in PROMPTS]
        got = [list(handle.result(60).outputs[0].token_ids) for handle in handles]
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        with torch.no_grad():
            wanted = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, eos_token_id=None
            )
        assert tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_in_bfloat16(architecture: str, tmp_path: Path) -> None:
    model = reference(architecture, tmp_path, torch.bfloat16)
    runner = make_runner(tmp_path)
    assert runner.config.dtype == "bfloat16"
    seen: list[torch.Tensor] = []

    def probe(state: ExecuteModelState) -> None:
        seen.append(state.logits.clone())

    runner.stages.insert(probe, after="forward")
    with ServingLoop(runner) as loop:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        tokens = list(loop.add(list(PROMPTS[0]), params).result(60).outputs[0].token_ids)
    ids = torch.tensor([[*PROMPTS[0], *tokens[:-1]]], device="cuda")
    with torch.no_grad():
        theirs = model(ids).logits[0, len(PROMPTS[0]) - 1 :].float()
        exact = model.float()(ids).logits[0, len(PROMPTS[0]) - 1 :]
    got = torch.cat([logits[:1] for logits in seen[-4:]])
    error, their_error = (((logits - exact).norm() / exact.norm()).item() for logits in (got, theirs))
    assert error < max(2e-2, their_error)
