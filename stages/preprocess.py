"""Assemble what the model is called with, at the planned shape."""

from __future__ import annotations

from .input_buffers import InputBuffers
from .records import BatchExecutionDescriptor, ModelInputs, PreparedInputs


class Preprocess:
    """Token-id inputs. Models with embeddings or other inputs get a stage of their own here."""

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers

    def __call__(self, inputs: PreparedInputs, execution: BatchExecutionDescriptor) -> ModelInputs:
        """Ids and positions cut to the padded number of tokens; the tail is padding already."""
        return ModelInputs(
            input_ids=self._buffers.heads.input_ids.first(execution.num_tokens),
            positions=self._buffers.heads.positions.first(execution.num_tokens),
        )
