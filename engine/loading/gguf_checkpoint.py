"""A model in a GGUF file, seen as a Hugging Face checkpoint: same configuration keys, tensor names and row order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from ..chat_template import ChatTemplate
from ..models.errors import ModelLoadError, UnsupportedModel
from ..models.rope import FREQUENCY_FACTORS
from ..tokenizer import Tokenizer
from .gguf_file import GGUFFile

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HALF_TYPES: Mapping[GGMLQuantizationType, torch.dtype] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
}


class GGUFCheckpoint:
    """A :class:`~.checkpoint.Checkpoint` in one GGUF file.

    Raises:
        UnsupportedModel: an architecture that twostroke does not compute, or a file that is one of several.
        ModelLoadError: a corrupt file, or one that lacks metadata of its architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._metadata = self._file.metadata
        self._architecture = str(self._metadata.get("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            supported = ", ".join(_ARCHITECTURES)
            raise UnsupportedModel(
                f"{path}: architecture {self._architecture!r} is not supported; supported in GGUF files: {supported}"
            )
        if self._metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(f"{path} is one of several files: join them with llama-gguf-split --merge first")
        if self._value("expert_count", default=0):
            raise UnsupportedModel(f"{path}: mixtures of experts are not supported")
        self.config: Mapping[str, Any] = self._read_config()

    @property
    def name(self) -> str:
        """What the file calls the model, else the file's name."""
        return self._metadata.get("general.name") or self.path.stem

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding; bfloat16 where that is quantized, since its range fits any scale."""
        return _HALF_TYPES.get(self._file.tensors[_EMBEDDING].kind, torch.bfloat16)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ends of sequence, turn and message, as far as the file names them."""
        named = (self._metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(token_id for token_id in named if token_id is not None))

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the file, if it holds one."""
        return Tokenizer.from_gguf(self._metadata) if "tokenizer.ggml.model" in self._metadata else None

    def chat_template(self) -> ChatTemplate:
        """The template in the file, if it holds one."""
        return ChatTemplate.from_gguf(self._metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, dequantized, by its Hugging Face name; names that have none come as they are."""
        for name in self._file.tensors:
            if name == _ROPE_FACTORS or name.endswith("attn_rot_embd.weight"):
                continue
            array = self._file.array(name)
            yield _hugging_face_name(name), torch.from_numpy(self._unpermuted(name, array))

    def _unpermuted(self, name: str, array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Query and key rows as Hugging Face has them: the halves of each head apart, not their pairs interleaved."""
        found = _LAYER.fullmatch(name)
        if self._architecture != "llama" or not found or found[2] not in ("attn_q", "attn_k"):
            return array
        heads = self.config["num_attention_heads" if found[2] == "attn_q" else "num_key_value_heads"]
        if array.shape[0] % (2 * heads):
            raise ModelLoadError(f"{self.path}: tensor {name!r} has {array.shape[0]} rows, not {heads} heads of pairs")
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    def _read_config(self) -> dict[str, Any]:
        tensors = self._file.tensors
        if _EMBEDDING not in tensors:
            raise ModelLoadError(f"{self.path}: tensor {_EMBEDDING!r} is missing")
        vocab_size, hidden_size = tensors[_EMBEDDING].shape
        heads = self._number("attention.head_count")
        head_dim = self._value("attention.key_length", default=None) or self._value(
            "rope.dimension_count", default=None
        )
        head_dim = head_dim or hidden_size // heads
        if self._value("rope.dimension_count", default=head_dim) != head_dim:
            raise UnsupportedModel(f"{self.path}: rotating only a part of each head is not supported")
        window = self._value("attention.sliding_window", default=None) or None
        is_mistral = self._architecture == "llama" and window
        return {
            "architectures": ["MistralForCausalLM" if is_mistral else _ARCHITECTURES[self._architecture]],
            "model_type": "mistral" if is_mistral else self._architecture,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._value("attention.layer_norm_rms_epsilon", default=1e-6),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "sliding_window": window,
            "rope_parameters": self._rope_parameters(),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
        }

    def _rope_parameters(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._value("rope.freq_base", default=10_000.0)}
        if _ROPE_FACTORS in self._file.tensors:
            return rope | {"rope_type": FREQUENCY_FACTORS, "factors": self._file.array(_ROPE_FACTORS).tolist()}
        linear = self._value("rope.scale_linear", default=1.0)  # how files said it before scaling had a type
        scaling = self._value("rope.scaling.type", default="none" if linear == 1.0 else "linear")
        if scaling == "none":
            return rope | {"rope_type": "default"}
        factor = self._value("rope.scaling.factor", default=linear)
        rope |= {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            # Hugging Face has the whole factor on cosines and sines here, GGUF what multiplies the paper's.
            multiplier = self._value("rope.scaling.attn_factor", default=1.0)
            rope |= {
                "original_max_position_embeddings": self._value("rope.scaling.original_context_length", default=None),
                "beta_fast": self._value("rope.scaling.yarn_beta_fast", default=None),
                "beta_slow": self._value("rope.scaling.yarn_beta_slow", default=None),
                "attention_factor": multiplier * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            }
        return rope

    def _value(self, key: str, *, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def _number(self, key: str, *, default: int | None = None) -> int:
        value = self._value(key, default=default)
        if isinstance(value, list):
            raise UnsupportedModel(f"{self.path}: {self._architecture}.{key} differs by layer, which is not supported")
        if not isinstance(value, int):
            raise ModelLoadError(f"{self.path}: metadata {self._architecture}.{key} is missing")
        return value


def _hugging_face_name(name: str) -> str:
    found = _LAYER.fullmatch(name)
    if found and found[2] in _LAYER_NAMES:
        return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}.{found[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name
