"""A kernel as type checkers see it: a grid chooses the programs, and a launch takes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import triton


class Kernel(Protocol):
    """What ``triton.jit`` makes of a kernel."""

    def __getitem__(self, grid: tuple[Any, ...], /) -> Callable[..., object]:
        """A launch over ``grid``; it takes the kernel's arguments, ints for its constants, and launch options."""
        ...


def kernel(**options: Any) -> Callable[[Callable[..., object]], Kernel]:
    """``triton.jit(**options)`` for a function that is launched; those that kernels call keep ``triton.jit``.

    ``triton.jit`` types a launch by the kernel's own signature, which knows neither launch options nor that an int is
    taken for a ``constexpr``.
    """
    return cast("Callable[[Callable[..., object]], Kernel]", triton.jit(**options))
