"""Compiles every kernel for a GPU that is not there: a program, run with the number of its compute capability.

Kernels are called as the engine calls them, on CPU tensors, but for the launch. It prints a line for each that was
compiled: its name, and whether it waits for the kernel before it.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from twostroke.engine.kernels.copy import RowCopies
from twostroke.engine.kernels.decode_attention import DecodeConfig, DecodeWorkspace, PagedKeys, decode_attention
from twostroke.engine.kernels.inputs import BringInputs
from twostroke.engine.kernels.linear import LinearConfig, skinny_linear
from twostroke.engine.kernels.logit_edits import EDIT_FIELDS, EditLists, GrammarMasks, KnownTokens, edit_logits
from twostroke.engine.kernels.logits_rows import LogitsRows
from twostroke.engine.kernels.logprobs import score_tokens
from twostroke.engine.kernels.mixed_attention import mixed_attention
from twostroke.engine.kernels.norm import add_rms_norm, embed_rms_norm, silu_mul
from twostroke.engine.kernels.pages import list_pages
from twostroke.engine.kernels.rope import HeadNorms, KeyPlace, RopeTables, rope_store
from twostroke.engine.kernels.sampling import DrawParams, choose_tokens
from twostroke.engine.kernels.store import store_keys
from twostroke.engine.kernels.tokens import TokenWriter, scatter_pieces
from twostroke.engine.kernels.truncation import Truncation, find_floors
from twostroke.stages.specs import AttentionLayerSpec

CPU = torch.device("cpu")


class Compiled:
    """Takes the place of a launch."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any, **options: Any) -> None:
        """Compile for these arguments."""
        if "FAST" in options:  # as for tensors on a GPU
            options["FAST"] = True
        compiled: Any = self.kernel.run(*args, grid=(1,), warmup=True, **options)
        print(self.kernel.__name__, "griddepcontrol.wait" in compiled.asm["ptx"])


def compile_all(dtype: torch.dtype, pdl: bool) -> None:
    """Every kernel, with and without what may be left out."""

    def full(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape, dtype=like)

    ids, ints = full(4, like=torch.int64), full(5, like=torch.int32)
    cache, norm = full(2, 8, 16, 2, 64), full(64)
    rope = RopeTables(full(32, 64), full(32, 32))
    for bias, gated in itertools.product((None, full(128)), (False, True)):
        for split in (1, 2)[: 1 if gated else 2]:
            skinny_linear(full(4, 256), full(128, 256), bias, LinearConfig(32, 64, split), gated=gated, pdl=pdl)
    for parts in (full(1, 4, 256), full(2, 4, 256, like=torch.float32)):
        add_rms_norm(parts, full(4, 256), full(256), 1e-6, pdl=pdl)
    embed_rms_norm(ints[:4], full(8, 256), full(256), 1e-6)
    silu_mul(full(4, 512), pdl=pdl)
    for norms, count in itertools.product((None, HeadNorms(norm, norm, 1e-6)), (4, 80)):
        positions = full(count, like=torch.int64)
        rope_store(full(1, count, 8 * 64), positions, rope, KeyPlace(cache, positions), norms, pdl=pdl)
    store_keys(full(4, 2, 64), full(4, 2, 64), ids, cache)
    paged = PagedKeys(cache, full(4, 8, like=torch.int32), ints[:4])
    workspace = DecodeWorkspace(4, 16, 4, 64, CPU)
    for window, soft_cap in ((None, None), (8, 30.0)):
        layer = AttentionLayerSpec(
            num_heads=4, num_kv_heads=2, head_size=64, scale=1.0, sliding_window=window, soft_cap=soft_cap
        )
        for splits in (1, 4):
            decode_attention(full(4, 4, 64), paged, layer, workspace, DecodeConfig(64, splits), pdl=pdl)
        for longest in (1, 64):
            mixed_attention(full(4, 4, 64), paged, ints, layer, longest, pdl=pdl)
    sample_all()
    columns, words, table = full(4, 9, like=torch.int64), full(10, like=torch.int32), full(64, like=torch.int32)
    BringInputs(1)((columns, columns), (words, words), (table, words), 9, 4, 9)
    scatter_pieces(full(5, like=torch.int64), full(9, like=torch.int32), full(64, like=torch.int32))
    TokenWriter()(full(64, like=torch.int32), ids, ids, 100)
    RowCopies()(full(2, 5, like=torch.int32), full(2, 8, like=torch.int32))
    list_pages(paged.block_table, paged.seq_lens, 16, ints, full(32, like=torch.int32), ints[:4])


def sample_all() -> None:
    """The kernels of sampling, which read float32 logits: plain, by rows, edited, and with floors."""

    def full(*shape: int, like: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=like)

    logits, ids, ints = full(4, 9000), full(4, like=torch.int64), full(4, like=torch.int32)
    params = DrawParams(full(4), full(2, 4, like=torch.int32), ints)
    truncation = Truncation(ints, full(4), full(4), ints)
    plain, listed = LogitsRows(logits), LogitsRows(logits, ids)
    lists = EditLists(full(4, len(EDIT_FIELDS), like=torch.int32), ints, ints, full(3, 4), ints)
    known = KnownTokens(full(4, 32, like=torch.int32), ints, 32)
    edited = edit_logits(listed, lists, known, full(4, 9000, like=torch.int32), GrammarMasks(ints, ints))
    for source in (plain, listed, listed._replace(edited=edited)):
        choose_tokens(source, params)
        choose_tokens(source, params, find_floors(source, params.temperatures, truncation))
    score_tokens(listed, ids, 5)


def main() -> None:
    """Compile for the capability of the first argument (90 is 9.0), in float32 and bfloat16."""
    capability = int(sys.argv[1])
    triton.runtime.driver.set_active(
        SimpleNamespace(  # pyright: ignore[reportArgumentType]
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )
    JITFunction.__getitem__ = lambda self, grid: Compiled(self)
    for dtype in (torch.float32, torch.bfloat16):
        compile_all(dtype, pdl=capability >= 90)


if __name__ == "__main__":
    main()
