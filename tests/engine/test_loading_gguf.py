"""GGUF files: tiny ones written with the gguf package, broken ones, and the packaged model against its golden run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from twostroke.engine.loading import LoadedModel, load_model, read_spec
from twostroke.engine.loading.gguf_file import GGUFFile
from twostroke.engine.models import Decoder, ModelLoadError, UnsupportedModel, WeightsError, random_model, tiny_config
from twostroke.engine.models.rope import RopeParameters
from twostroke.fsm.errors import TwoStrokeError

TOKENS = [5, 3, 9, 9, 60, 2, 31, 44, 17]
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Logits = Callable[..., torch.Tensor]


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", maxsplit=3)
    return f"blk.{layer}.{IN_LAYER[inner]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them: pairs (i, i + half) of each head next to each other."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: Decoder,
    *,
    arch: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a model as llama.cpp's converter does; matrices as ``kind``, whatever fits no block as float32."""
    config = model.config
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    named: dict[str, np.ndarray] = {}
    for name, parameter in model.parameters.items():
        array = parameter.numpy()
        if arch == "llama" and ".q_proj" in name:
            array = interleaved(array, config.num_heads)
        if arch == "llama" and ".k_proj" in name:
            array = interleaved(array, config.num_kv_heads)
        named[gguf_name(name)] = np.ascontiguousarray(array)
    for name, array in (named | dict(tensors or {})).items():
        if array.ndim > 1 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
    "mistral": ("mistral", {"sliding_window": 4}, {"llama.attention.sliding_window": 4}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, {}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "llama-old-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"llama.rope.scale_linear": 2.0},
    ),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_its_model(case: str, tmp_path: Path, logits_of: Logits) -> None:
    architecture, overrides, metadata = CASES[case]
    model = random_model(tiny_config(architecture, **overrides))
    arch = "llama" if architecture == "mistral" else architecture
    write_gguf(tmp_path / "model.gguf", model, arch=arch, metadata=metadata)
    loaded = load_model(str(tmp_path / "model.gguf"))
    torch.testing.assert_close(logits_of(loaded.model, TOKENS), logits_of(model, TOKENS), atol=1e-5, rtol=1e-5)
    assert loaded.spec == model.spec == read_spec(str(tmp_path / "model.gguf"))
    assert loaded.tokenizer is None
    assert loaded.name == "model"


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16, GGMLQuantizationType.BF16])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_quantized_files(architecture: str, kind: GGMLQuantizationType, tmp_path: Path, logits_of: Logits) -> None:
    model = random_model(tiny_config(architecture))
    write_gguf(tmp_path / "model.gguf", model, arch=architecture, kind=kind)
    expected = random_model(tiny_config(architecture))
    rounded = {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind))
        for name, parameter in model.parameters.items()
        if parameter.ndim > 1
    }
    expected.load_weights(rounded.items(), allow_missing=True)
    loaded = load_model(str(tmp_path / "model.gguf"))
    assert not torch.equal(loaded.model.weights.layers[0].down, model.weights.layers[0].down)
    torch.testing.assert_close(logits_of(loaded.model, TOKENS), logits_of(expected, TOKENS), atol=1e-5, rtol=1e-5)


def test_llama3_scaling_is_a_tensor_of_factors(tmp_path: Path, logits_of: Logits) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config(rope_parameters=rope)
    model = random_model(config)
    plain = RopeParameters.from_config(config | {"rope_parameters": {"rope_theta": 1_000.0}}, 8)
    factors = (plain.inverse_frequencies()[0] / model.config.rope.inverse_frequencies()[0]).numpy()
    assert len(set(factors.round(3).tolist())) > 2
    write_gguf(tmp_path / "model.gguf", model, arch="llama", tensors={"rope_freqs.weight": factors})
    loaded = load_model(str(tmp_path / "model.gguf"))
    torch.testing.assert_close(logits_of(loaded.model, TOKENS), logits_of(model, TOKENS), atol=1e-4, rtol=1e-4)
    write_gguf(tmp_path / "short.gguf", model, arch="llama", tensors={"rope_freqs.weight": factors[:-1]})
    refused(tmp_path / "short.gguf", "holds 3 factors, expected 4")


def test_the_header_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    metadata = {"a.text": "é", "a.list": ["x", "", "ü"], "a.numbers": [1, -2], "a.flag": True, "a.float": 0.5}
    write_gguf(path, random_model(tiny_config()), arch="llama", metadata=metadata)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.metadata.items() >= metadata.items()
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        assert np.array_equal(ours.array(tensor.name), tensor.data)


def refused(path: Path, message: str, kind: type[TwoStrokeError] = ModelLoadError) -> None:
    with pytest.raises(kind, match=message):
        load_model(str(path))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", random_model(tiny_config()), arch="llama")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("keep", "message"),
    [(0, "cannot be read"), (2, "is not a GGUF file"), (10, "corrupt or cut off"), (300, "corrupt or cut off")],
)
def test_a_cut_off_header(tiny_file: Path, keep: int, message: str) -> None:
    tiny_file.write_bytes(tiny_file.read_bytes()[:keep])
    refused(tiny_file, message)


def test_cut_off_data_names_the_tensor(tiny_file: Path) -> None:
    tiny_file.write_bytes(tiny_file.read_bytes()[:-200])
    refused(tiny_file, r"tensor '[\w.]+' ends \d+ bytes after the file: it is cut off")


def test_garbage_and_other_versions(tiny_file: Path) -> None:
    content = tiny_file.read_bytes()
    tiny_file.write_bytes(b"PK" + content[2:])
    refused(tiny_file, "does not start with 'GGUF'")
    tiny_file.write_bytes(content[:4] + b"\x00\x00\x00\x03" + content[8:])
    refused(tiny_file, "big-endian order", UnsupportedModel)
    tiny_file.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    refused(tiny_file, "corrupt or cut off")


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("gemma", {}, r"architecture 'gemma' is not supported; supported in GGUF files: llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixtures of experts"),
        ("llama", {"split.count": 2}, "llama-gguf-split --merge"),
        ("llama", {"llama.rope.dimension_count": 4}, "only a part of each head"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope type 'longrope'"),
    ],
)
def test_what_is_not_computed_is_refused(arch: str, metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model(tiny_config()), arch=arch, metadata=metadata)
    refused(tmp_path / "model.gguf", message, UnsupportedModel)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model, path = random_model(tiny_config()), tmp_path / "model.gguf"
    write_gguf(path, model, arch="llama", tensors={"blk.0.ffn_sub_norm.weight": np.zeros(32, np.float32)})
    refused(path, r"unexpected tensor 'blk\.0\.ffn_sub_norm\.weight'", WeightsError)
    write_gguf(path, model, arch="llama", tensors={"blk.1.attn_k.weight": np.zeros((16, 30), np.float32)})
    refused(path, r"k_proj\.weight' has shape \[16, 30\], expected \[16, 32\]", WeightsError)
    write_gguf(path, model, arch="llama", tensors={"blk.1.attn_k.weight": np.zeros((6, 32), np.float32)})
    refused(path, r"'blk\.1\.attn_k\.weight' has 6 rows, not 2 heads of pairs")
    write_gguf(path, model, arch="llama")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"output_norm.weight", b"output_n0rm.weight"))
    refused(path, r"unexpected tensor 'output_n0rm\.weight'", WeightsError)
    path.write_bytes(content.replace(b"llama.feed_forward_length", b"llama.feed_f0rward_length"))
    refused(path, r"metadata llama\.feed_forward_length is missing")


def test_types_that_gguf_cannot_dequantize(tiny_file: Path) -> None:
    file = GGUFFile(tiny_file)
    name = "output_norm.weight"
    content = bytearray(tiny_file.read_bytes())
    at = content.index(name.encode()) + len(name) + 4 + 8  # after the number of dimensions and the one dimension
    assert content[at] == file.tensors[name].kind
    content[at] = GGMLQuantizationType.I8
    tiny_file.write_bytes(content)
    refused(tiny_file, r"'output_norm\.weight' has type I8, which the gguf package cannot dequantize", UnsupportedModel)


# The packaged model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(data_path: Path) -> list[dict[str, Any]]:
    """What transformers gave for five prompts."""
    return json.loads((data_path / "golden_smollm2_fp32.json").read_text())["cases"]


@pytest.mark.model
def test_smollm2_belongings(smollm2: LoadedModel) -> None:
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.max_model_len == 8192
    assert len(smollm2.spec.attention_layers) == 30
    assert smollm2.model.weights.lm_head is smollm2.model.weights.embedding
    assert smollm2.require_tokenizer().vocab_size == smollm2.spec.vocab_size == 49152


@pytest.mark.model
def test_smollm2_tokens_and_texts(smollm2: LoadedModel, golden: list[dict[str, Any]]) -> None:
    tokenizer = smollm2.require_tokenizer()
    assert len(golden) == 5
    for case in golden:
        assert tokenizer.encode(case["prompt"]) == case["prompt_token_ids"]
        assert tokenizer.decode(case["output_token_ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.model
def test_smollm2_first_logprobs(smollm2: LoadedModel, golden: list[dict[str, Any]], logits_of: Logits) -> None:
    for case in golden:
        logprobs = logits_of(smollm2.model, case["prompt_token_ids"])[-1].log_softmax(-1)
        expected = dict(case["first_step_top5_logprobs"])
        assert logprobs.topk(5).indices.tolist() == list(expected)
        torch.testing.assert_close(logprobs[list(expected)], torch.tensor(list(expected.values())), atol=1e-3, rtol=0)


@pytest.mark.model
def test_smollm2_chat_prompt(smollm2: LoadedModel) -> None:
    prompt = smollm2.chat_template.render([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.require_tokenizer().encode(prompt).count(1) == 3
