"""How the inputs of a step get to where the model reads them, ids included, which may be known there alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .input_buffers import TOKEN_INDEX, InputBuffers
from .request_table import RequestTable

InputUpload = Callable[[int], None]
"""Brings ``tokens`` and ``requests`` of the buffers to the device, as far as so many tokens need, and fills
``input_ids`` by ``token_index``, with 0 behind them. Nothing is waited for."""


def input_upload(table: RequestTable, buffers: InputBuffers) -> InputUpload:
    """The one that fits the table's device."""
    return (HostInputs if table.device.shares_host_memory else DeviceInputs)(table, buffers)


class HostInputs:
    """In host memory, by numpy: a fifth of the time of the same torch calls for few tokens."""

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._tokens = table.token_ids_host.reshape(-1)
        self._index = buffers.tokens
        self._input_ids = buffers.input_ids.numpy()

    def __call__(self, num_tokens: int) -> None:
        """Look up the ids; all else is there."""
        ids = self._input_ids
        self._tokens.take(self._index.array[TOKEN_INDEX, :num_tokens], out=ids[:num_tokens], mode="clip")
        ids[num_tokens:] = 0


class DeviceInputs:
    """By copies, and a lookup in the device's memory, behind the steps that were launched before."""

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._table = table.token_ids.view(-1)
        self._buffers = buffers

    def __call__(self, num_tokens: int) -> None:
        """Launch them."""
        self._buffers.tokens.flush_first(num_tokens)
        self._buffers.requests.flush()
        heads = self._buffers.heads
        index = heads.token_index.first(num_tokens)
        torch.index_select(self._table, 0, index, out=heads.input_ids.first(num_tokens))
        heads.input_ids.rest(num_tokens).zero_()
