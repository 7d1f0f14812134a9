"""What the loader needs to know of a stored model, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..chat_template import ChatTemplate
from ..tokenizer import Tokenizer


class Checkpoint(Protocol):
    """A stored model. Opening one is cheap; weights are read as :meth:`tensors` yields them."""

    @property
    def name(self) -> str:
        """A name for people."""
        ...

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, with the keys of a Hugging Face ``config.json``."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are stored in, or what fits them best."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the checkpoint has one."""
        ...

    def chat_template(self) -> ChatTemplate:
        """The chat template; an empty one if there is none."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its Hugging Face name, one at a time."""
        ...
