"""Errors about model files and what is in them."""

from __future__ import annotations

from collections.abc import Iterable

from ...fsm.errors import TwoStrokeError


class ModelLoadError(TwoStrokeError, ValueError):
    """A model that cannot be loaded; the message names the file, key or tensor, and what to do."""


class UnsupportedModel(ModelLoadError):
    """A well-formed model with something that twostroke does not compute (architecture, rope type, activation …)."""


class WeightsError(ModelLoadError):
    """Tensors that do not fit the model; ``tensors`` names them."""

    def __init__(self, message: str, tensors: Iterable[str]) -> None:
        self.tensors = tuple(tensors)
        super().__init__(message)
