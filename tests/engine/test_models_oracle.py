"""Hugging Face transformers as the oracle: folders that it wrote, loaded here, give its logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils.chat_template_utils import render_jinja_template
from twostroke.engine.chat_template import ChatTemplate
from twostroke.engine.loading import load_model, read_spec

TOKENS = [3, 41, 7, 7, 0, 25, 13, 60, 2, 19, 33, 8, 54, 1, 63, 5, 40, 11, 22, 9]
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12, "num_key_value_heads": 4}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-epsilon": ("Llama", {"rms_norm_eps": 0.1}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn-mscale": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    ),
}


def oracle(family: str, overrides: dict[str, Any]) -> transformers.PreTrainedModel:
    """A tiny transformers model; every parameter is random, so a bias or a norm that is ignored shows."""
    config = getattr(transformers, f"{family}Config")(**(TINY | overrides))
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=spread)
    return model


def expected_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Its logits for :data:`TOKENS`, ``[num_tokens, vocab]``."""
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path, logits_of: Callable[..., torch.Tensor]) -> None:
    model = oracle(*CASES[case])
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    expected = expected_logits(model)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits_of(loaded.model, TOKENS), expected, atol=1e-4, rtol=1e-4)
    assert read_spec(str(tmp_path)) == loaded.spec
    assert loaded.tokenizer is None


def test_shards_are_found_through_the_index(tmp_path: Path, logits_of: Callable[..., torch.Tensor]) -> None:
    model = oracle("Llama", {})
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        logits_of(load_model(str(tmp_path)).model, TOKENS), expected_logits(model), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN], ids=["default", "linear", "llama3", "yarn"])
def test_folders_of_older_transformers(
    scaling: dict[str, Any] | None, tmp_path: Path, logits_of: Callable[..., torch.Tensor]
) -> None:
    model = oracle("Llama", {"rope_parameters": scaling or {"rope_type": "default", "rope_theta": 500.0}})
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if scaling else None
    config["torch_dtype"] = config.pop("dtype", "float32")
    file.write_text(json.dumps(config))
    torch.testing.assert_close(
        logits_of(load_model(str(tmp_path)).model, TOKENS), expected_logits(model), atol=1e-4, rtol=1e-4
    )


def test_half_precision_stays_near(tmp_path: Path, logits_of: Callable[..., torch.Tensor]) -> None:
    model = oracle("Qwen3", {"head_dim": 8})
    model.save_pretrained(tmp_path)
    logits = logits_of(load_model(str(tmp_path), dtype="bfloat16").model, TOKENS)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected_logits(model), atol=0.3, rtol=0.05)


TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'tool' %}{% continue %}{% endif %}
<|{{ m.role }}|>{% generation %}{{ m.content | trim }}{% endgeneration %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "é<>'", "parameters": {}}}]])
def test_chat_prompts_equal_transformers(tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> None:
    messages = [{"role": "user", "content": "  hi <b>\n"}, {"role": "tool", "content": "x"}]
    [expected], _ = render_jinja_template(
        [messages],
        tools=tools,  # pyright: ignore[reportArgumentType]
        chat_template=TEMPLATE,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    assert template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt) == expected
