"""A kernel as type checkers see it: a grid chooses the programs, and a launch takes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import triton
from triton.compiler import CompiledKernel


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


class Relaunched:
    """A kernel that each step launches anew: found once for each kind of arguments, as to find it takes 20 us.

    The kernel may specialise on nothing but the types of its arguments, which the caller names by a key, and its
    constants. Launch options are given once.
    """

    def __init__(self, kernel: Kernel, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[object, CompiledKernel] = {}

    def __call__(self, key: object, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch it; the arguments are all of the kernel's, constants included, in its order."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        launched = self._kernel[grid](*arguments, **self._options)
        if isinstance(launched, CompiledKernel):  # the interpreter gives nothing
            self._compiled[key] = launched
