"""Loads a model with all that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen

from ...stages.specs import ModelSpec
from ..chat_template import ChatTemplate
from ..config import DTYPES
from ..models.decoder import Decoder
from ..models.decoder_config import DecoderConfig
from ..models.errors import ModelLoadError, WeightsError
from ..tokenizer import Tokenizer, TokenizerError
from .checkpoint import Checkpoint
from .sources import open_checkpoint


@frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model, ready to run. ``max_model_len`` is in tokens, from the configuration; ``config`` has Hugging Face keys.

    ``tokenizer`` is None for a model that came without one: it can be used with token ids.
    """

    model: Decoder
    spec: ModelSpec
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    name: str
    path: Path
    max_model_len: int
    config: Mapping[str, Any] = field(repr=False)

    def release_weights(self) -> None:
        """Free the memory of every weight; the tensor objects, and views of them, stay. Idempotent."""
        for tensor in self.model.weights.owned().values():
            tensor.untyped_storage().resize_(0)

    def reload_weights(self) -> None:
        """Read every weight again, into the tensors that there are, one at a time.

        Raises:
            ModelLoadError: the model can't be read, or is no longer the same.
        """
        for tensor in self.model.weights.owned().values():
            tensor.untyped_storage().resize_(tensor.nbytes)
        self.model.load_weights(open_checkpoint(str(self.path)).tensors())

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            TokenizerError: the model came without one.
        """
        if self.tokenizer is None:
            raise TokenizerError(f"{self.path} has no tokenizer.json: pass prompts as token ids")
        return self.tokenizer


def load_model(
    path_or_id: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    native: bool = True,
) -> LoadedModel:
    """Load a Hugging Face folder, a GGUF file, ``"smollm2"`` or a hub id.

    Weights are read one tensor at a time, straight into the packed parameters.

    Args:
        path_or_id: see :func:`~.sources.open_checkpoint`.
        device: a torch device; "auto" is a GPU if there is one.
        dtype: a torch dtype or its name; "auto" is float32 on a CPU and the checkpoint's own elsewhere.
        native: whether products in float32 on a CPU are those of the native kernels, where these can be had.

    Raises:
        ModelLoadError: a model that is missing, corrupt, incomplete or not supported, or a device that is not there.
        TokenizerError: its tokenizer cannot be built.
    """
    device = _resolved_device(device)
    checkpoint = open_checkpoint(path_or_id)
    config = _decoder_config(checkpoint)
    tokenizer = checkpoint.tokenizer()
    model = _empty_model(config, checkpoint, device, _resolved_dtype(dtype, device, checkpoint), native=native)
    try:
        model.load_weights(checkpoint.tensors())
    except WeightsError as error:
        raise WeightsError(f"{checkpoint.path}: {error}", error.tensors) from error
    tokenizer_eos = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return LoadedModel(
        model=model,
        spec=model.spec,
        tokenizer=tokenizer,
        chat_template=checkpoint.chat_template(),
        eos_token_ids=tuple(dict.fromkeys((*checkpoint.eos_token_ids, *tokenizer_eos))),
        bos_token_id=checkpoint.config.get("bos_token_id"),
        name=checkpoint.name,
        path=checkpoint.path,
        max_model_len=config.max_position,
        config=checkpoint.config,
    )


def read_spec(path_or_id: str) -> ModelSpec:
    """The shapes of a stored model, without its weights.

    Raises:
        ModelLoadError: as :func:`load_model`.
    """
    return _decoder_config(open_checkpoint(path_or_id)).spec()


def _decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    try:
        return DecoderConfig.from_dict(checkpoint.config)
    except ModelLoadError as error:
        raise type(error)(f"{checkpoint.path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        # Values of kinds that no reader expects, such as a list for a number.
        problem = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"{checkpoint.path}: its configuration is malformed ({problem})") from error


def _empty_model(
    config: DecoderConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, native: bool
) -> Decoder:
    try:
        return Decoder(config, device=device, dtype=dtype, native=native)
    except RuntimeError as error:  # torch has no other type for this on a CPU
        raise ModelLoadError(f"{checkpoint.path}: no memory for a model of this size on {device}: {error}") from error


def _resolved_device(device: torch.device | str) -> torch.device:
    try:
        chosen = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
        )
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, TypeError) as error:  # as torch says it depends on how it was built
        raise ModelLoadError(f"device {device!r:.80} cannot be used: {error}") from error
    return chosen


def _resolved_dtype(dtype: torch.dtype | str, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint.dtype
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is unknown; use 'auto' or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
