"""How the ids of a step are looked up in the token table, in the memory where that lies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .input_buffers import TOKEN_INDEX, InputBuffers
from .request_table import RequestTable

TokenLookup = Callable[[int], None]
"""Fills ``input_ids`` by the first so many entries of ``token_index``, and 0 behind them. Nothing is waited for."""


def token_lookup(table: RequestTable, buffers: InputBuffers) -> TokenLookup:
    """The one that fits the table's device."""
    return (HostLookup if table.device.shares_host_memory else DeviceLookup)(table, buffers)


class HostLookup:
    """In host memory, by numpy: a fifth of the time of the same torch calls for few tokens."""

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._tokens = table.token_ids_host.reshape(-1)
        self._index = buffers.tokens
        self._input_ids = buffers.input_ids.numpy()

    def __call__(self, num_tokens: int) -> None:
        """Look them up."""
        ids = self._input_ids
        self._tokens.take(self._index.array[TOKEN_INDEX, :num_tokens], out=ids[:num_tokens], mode="clip")
        ids[num_tokens:] = 0


class DeviceLookup:
    """In the device's memory, behind the steps that were launched before."""

    def __init__(self, table: RequestTable, buffers: InputBuffers) -> None:
        self._tokens = table.token_ids.view(-1)
        self._heads = buffers.heads

    def __call__(self, num_tokens: int) -> None:
        """Launch it."""
        heads = self._heads
        index = heads.token_index.first(num_tokens)
        torch.index_select(self._tokens, 0, index, out=heads.input_ids.first(num_tokens))
        heads.input_ids.rest(num_tokens).zero_()
