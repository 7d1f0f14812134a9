"""What every kernel of a chain does at its beginning."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_dependent(PDL: tl.constexpr):
    """Let the next kernel start, then wait until what earlier kernels wrote can be read."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at these addresses to be brought into L2."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
