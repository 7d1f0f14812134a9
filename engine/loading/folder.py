"""A model in a Hugging Face folder: ``config.json`` and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..chat_template import ChatTemplate
from ..config import DTYPES
from ..models.errors import ModelLoadError
from ..tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


class FolderCheckpoint:
    """A :class:`~.checkpoint.Checkpoint` in a folder.

    Raises:
        ModelLoadError: no ``config.json``, or one that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / "config.json"
        if not file.is_file():
            inside = sorted(path.glob("*.gguf"))
            hint = f"; to load the GGUF file in it, pass {inside[0]}" if inside else ""
            raise ModelLoadError(f"{path} is no model folder: it has no config.json{hint}")
        self.config: Mapping[str, Any] = _read_json(file)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def dtype(self) -> torch.dtype:
        """What the configuration says, else float32."""
        stored = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        return DTYPES.get(str(stored).removeprefix("torch."), torch.float32)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of ``generation_config.json``, else of ``config.json``."""
        file = self.path / "generation_config.json"
        generation = _read_json(file) if file.is_file() else {}
        ids = generation.get("eos_token_id", self.config.get("eos_token_id"))
        listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) for token in listed):
            raise ModelLoadError(f"{self.path}: eos_token_id must be a token id or a list of them, got {ids!r}")
        return tuple(listed)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the folder has a ``tokenizer.json``."""
        return Tokenizer.from_folder(self.path) if (self.path / "tokenizer.json").is_file() else None

    def chat_template(self) -> ChatTemplate:
        """The folder's chat template; an empty one if there is none."""
        return ChatTemplate.from_folder(self.path)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of every shard, memory-mapped.

        Raises:
            ModelLoadError: no safetensors, a missing shard, or a file that is corrupt or cut off.
        """
        for file in self._shards():
            try:
                with safe_open(file, framework="pt", device="cpu") as shard:
                    for name in shard.keys():  # noqa: SIM118 (a handle, not a mapping)
                        yield name, shard.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} is corrupt or cut off: {error}") from error

    def _shards(self) -> list[Path]:
        index = self.path / INDEX
        if index.is_file():
            shard_of = _read_json(index).get("weight_map", {})
            if not isinstance(shard_of, dict) or not all(isinstance(name, str) for name in shard_of.values()):
                raise ModelLoadError(f"{index}: 'weight_map' must map the names of tensors to files")
            files = [self.path / name for name in sorted(set(shard_of.values()))]
        elif (self.path / "model.safetensors").is_file():
            files = [self.path / "model.safetensors"]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{self.path} has no safetensors file{self._other_weights()}")
        for file in files:
            if not file.is_file():
                raise ModelLoadError(f"{self.path}: shard {file.name}, which {INDEX} names, is missing")
        return files

    def _other_weights(self) -> str:
        pickles = sorted(file.name for pattern in _PICKLES for file in self.path.glob(pattern))
        if not pickles:
            return ": its weights are not downloaded"
        return (
            f", only {pickles[0]}: pickles can run code when they are read; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
