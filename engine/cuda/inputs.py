"""The inputs of a step on a GPU: brought and looked up by one kernel."""

from __future__ import annotations

from ...stages.input_buffers import TOKEN_INDEX, InputBuffers
from ...stages.request_table import RequestTable
from ..kernels.inputs import BringInputs


class CudaInputs:
    """As :class:`~twostroke.stages.input_upload.DeviceInputs` does it. Nobody else writes the ids on the device."""

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._table = table.token_ids.view(-1)
        self._buffers = buffers
        self._num_ids = buffers.max_tokens
        self._bring = BringInputs(TOKEN_INDEX)

    def __call__(self, num_tokens: int) -> None:
        """Launch it."""
        buffers, tokens, requests = self._buffers, self._buffers.tokens, self._buffers.requests
        self._num_ids = max(num_tokens, self._num_ids)
        self._bring(
            (tokens.host, tokens.device),
            (requests.host, requests.device),
            (self._table, buffers.input_ids),
            tokens.moving(num_tokens),
            num_tokens,
            self._num_ids,
        )
        tokens.moved(num_tokens)
        self._num_ids = num_tokens
