"""Assemble what the model is called with, at the planned shape."""

from __future__ import annotations

from .input_buffers import InputBuffers
from .records import BatchExecutionDescriptor, ModelInputs, PreparedInputs


class Preprocess:
    """Token-id inputs. Models with embeddings or other inputs get a stage of their own here."""

    def __init__(self, buffers: InputBuffers) -> None:
        self._heads = buffers.heads
        self._latest: tuple[int, ModelInputs] | None = None

    def __call__(self, inputs: PreparedInputs, execution: BatchExecutionDescriptor) -> ModelInputs:
        """Ids and positions cut to the padded number of tokens; the tail is padding already."""
        num_tokens = execution.num_tokens
        if self._latest is None or self._latest[0] != num_tokens:  # most steps are of the size of the one before
            self._latest = (
                num_tokens,
                ModelInputs(
                    input_ids=self._heads.input_ids.first(num_tokens),
                    positions=self._heads.positions.first(num_tokens),
                ),
            )
        return self._latest[1]
