"""The decoder by itself: its pieces, its parameters, the configurations it refuses, the random models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from twostroke.engine.models import (
    Decoder,
    DecoderConfig,
    ModelLoadError,
    UnsupportedModel,
    WeightsError,
    random_model,
    tiny_config,
)
from twostroke.stages.records import SegmentRunner

TOKENS = [5, 3, 9, 9, 60, 2, 31]
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]
Logits = Callable[..., torch.Tensor]


class CheckedPieces(SegmentRunner):
    """Notes each piece's index and checks what a captured graph needs of it."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def run(self, index: int, piece: Callable[..., Any], *args: Any) -> Any:
        """Run the piece; its arguments are tensors that it must not write, and so are its results."""
        self.indices.append(index)
        assert all(isinstance(argument, torch.Tensor) for argument in args)
        before = [argument.clone() for argument in args]
        results = piece(*args)
        for argument, copy in zip(args, before, strict=True):
            assert torch.equal(argument, copy), f"piece {index} wrote its input"
        assert all(
            isinstance(result, torch.Tensor) for result in (results if isinstance(results, tuple) else [results])
        )
        return results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pieces_are_fit_for_graphs(architecture: str, logits_of: Logits) -> None:
    model = random_model(tiny_config(architecture, num_hidden_layers=3))
    pieces = CheckedPieces()
    logits = logits_of(model, TOKENS, segments=pieces)
    assert pieces.indices == [0, 1, 2, 3]
    assert torch.equal(logits, logits_of(model, TOKENS))
    assert logits.shape == (len(TOKENS), 64)


def test_one_layer_has_two_pieces(logits_of: Logits) -> None:
    pieces = CheckedPieces()
    logits_of(random_model(tiny_config(num_hidden_layers=1)), TOKENS, segments=pieces)
    assert pieces.indices == [0, 1]


def test_embeddings_are_taken_before_ids(logits_of: Logits) -> None:
    model = random_model(tiny_config())
    embeddings = model.parameters["model.embed_tokens.weight"][TOKENS]
    expected = logits_of(model, TOKENS)
    pieces = CheckedPieces()
    given = logits_of(model, [0] * len(TOKENS), inputs_embeds=embeddings, segments=pieces)
    assert torch.equal(given, expected)


def test_spec_says_what_the_stages_need() -> None:
    config = tiny_config("mistral", sliding_window=6, head_dim=16)
    spec = random_model(config).spec
    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == ("MistralForCausalLM", 64, 32)
    assert spec.max_position == 128
    [layer, _] = spec.attention_layers
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.scale) == (4, 2, 16, 0.25)
    assert layer.sliding_window == 6
    assert layer.soft_cap is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_random_models_wander(architecture: str, tied: bool, logits_of: Logits) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    model = random_model(config, seed=3)
    tokens = [1, 2, 3]
    for _ in range(24):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    assert len(set(tokens)) > 6
    logits = logits_of(model, tokens)
    assert 2 < logits.std() < 4.5
    assert torch.equal(logits, logits_of(random_model(config, seed=3), tokens))
    assert not torch.allclose(logits, logits_of(random_model(config, seed=4), tokens))


def test_tied_head_is_the_embedding() -> None:
    tied = random_model(tiny_config(tie_word_embeddings=True))
    assert tied.weights.lm_head is tied.weights.embedding
    assert "lm_head.weight" not in tied.parameters
    assert "lm_head.weight" in random_model(tiny_config()).parameters


def test_parameters_are_updated_in_place(logits_of: Logits) -> None:
    model, other = random_model(tiny_config("qwen3"), seed=0), random_model(tiny_config("qwen3"), seed=1)
    packed = model.weights.layers[0].qkv
    address = packed.data_ptr()
    name = "model.layers.0.self_attn.k_proj.weight"
    model.load_weights([(name, other.parameters[name])], allow_missing=True)
    assert torch.equal(packed[32:48], other.weights.layers[0].qkv[32:48])
    assert not torch.equal(packed[:32], other.weights.layers[0].qkv[:32])
    model.load_weights(other.parameters.items())
    assert packed.data_ptr() == address
    assert torch.equal(logits_of(model, TOKENS), logits_of(other, TOKENS))


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_are_all_the_memory_of_the_model(tied: bool, logits_of: Logits) -> None:
    model = random_model(tiny_config("qwen2", tie_word_embeddings=tied))
    storages = [tensor.untyped_storage().data_ptr() for tensor in model.tensors().values()]
    assert len(set(storages)) == len(storages)
    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters.values()} < set(storages)
    other = random_model(tiny_config("qwen2", tie_word_embeddings=tied), seed=1)
    for name, tensor in model.tensors().items():
        tensor.untyped_storage().resize_(0)
        tensor.data = other.tensors()[name].data
    assert torch.equal(logits_of(model, TOKENS), logits_of(other, TOKENS))


def test_weights_are_converted_to_the_dtype_of_the_model() -> None:
    model = random_model(tiny_config(), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters.values()} == {torch.bfloat16}
    assert model.compute_logits(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.float32


def weights_without(model: Decoder, *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.parameters.items() if name not in names}


def test_missing_tensors_are_named() -> None:
    model = random_model(tiny_config("qwen2"))
    gone = ("model.norm.weight", "model.layers.1.self_attn.q_proj.bias")
    with pytest.raises(WeightsError, match=r"2 tensors are missing: model\.norm\.weight, .*q_proj\.bias") as raised:
        model.load_weights(weights_without(model, *gone).items())
    assert set(raised.value.tensors) == set(gone)


def test_many_missing_tensors_are_counted() -> None:
    model = random_model(tiny_config())
    with pytest.raises(WeightsError, match=r"21 tensors are missing: .* and 13 more"):
        model.load_weights([])


def test_mis_shaped_tensors_are_named() -> None:
    model = random_model(tiny_config())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(WeightsError, match=r"up_proj\.weight' has shape \[3, 32\], expected \[64, 32\]") as raised:
        model.load_weights({**model.parameters, name: torch.zeros(3, 32)}.items())
    assert raised.value.tensors == (name,)


def test_a_scalar_is_not_spread_over_a_parameter() -> None:
    model = random_model(tiny_config())
    with pytest.raises(WeightsError, match="has shape"):
        model.load_weights([("model.norm.weight", torch.zeros(()))], allow_missing=True)


def test_unexpected_tensors_are_named() -> None:
    model = random_model(tiny_config("llama"))
    extra = "model.layers.0.self_attn.q_norm.weight"
    with pytest.raises(WeightsError, match=r"unexpected tensor .*q_norm") as raised:
        model.load_weights([*model.parameters.items(), (extra, torch.zeros(8))])
    assert raised.value.tensors == (extra,)


def test_harmless_extras_are_passed_over(logits_of: Logits) -> None:
    model = random_model(tiny_config(tie_word_embeddings=True))
    before = logits_of(model, TOKENS)
    extras = {
        "lm_head.weight": torch.zeros(64, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.rotary_emb.inv_freq": torch.zeros(4),
    }
    model.load_weights({**model.parameters, **extras}.items())
    assert torch.equal(logits_of(model, TOKENS), before)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"MambaForCausalLM is not supported; supported: LlamaForCausalLM, Mi",
        ),
        ({"architectures": None}, r"none named \(model_type 'llama'\)"),
        ({"hidden_act": "xielu"}, r"hidden_act 'xielu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope type 'longrope' is not supported; supported: default, linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"differ by layer type"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"head_dim": 7}, r"head_dim 7 is odd"),
    ],
)
def test_what_is_not_computed_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        random_model(tiny_config(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": "32"}, "'hidden_size' must be a positive integer, got '32'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
    ],
)
def test_broken_configurations_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        DecoderConfig.from_dict(tiny_config(**overrides))


def test_layer_types_are_checked() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(ModelLoadError, match="names 1 layers, expected 2"):
        DecoderConfig.from_dict(tiny_config("qwen3", layer_types=["full_attention"], **window))
    with pytest.raises(UnsupportedModel, match="layer type 'chunked_attention'"):
        DecoderConfig.from_dict(tiny_config("qwen3", layer_types=["chunked_attention"] * 2, **window))


def test_tiny_config_knows_four_architectures() -> None:
    with pytest.raises(UnsupportedModel, match="'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"):
        tiny_config("gpt2")


def test_yarn_derives_its_factor_from_the_lengths() -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    derived = DecoderConfig.from_dict(tiny_config(rope_parameters=rope)).rope
    given = DecoderConfig.from_dict(tiny_config(rope_parameters=rope | {"factor": 4.0})).rope
    assert derived.values["factor"] == 4.0
    assert torch.equal(derived.inverse_frequencies()[0], given.inverse_frequencies()[0])
