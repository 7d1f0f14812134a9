"""The compiled kernels, as Python calls them. A call releases the interpreter lock."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from .compiling import NotCompiled, compiled_library

logger = logging.getLogger(__name__)

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class Layer(ctypes.Structure):
    """An attention layer; a window and a cap of 0 are none."""

    _fields_ = (
        *((name, _LONG) for name in ("num_heads", "num_kv_heads", "head_size", "window")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
    )


class Step(ctypes.Structure):
    """A planned batch. Pointers: ``starts``, ``lengths`` and ``blocks`` to int32, ``slots`` to int64."""

    _fields_ = (
        *((name, _LONG) for name in ("num_tokens", "num_reqs", "block_size", "blocks_stride")),
        *((name, _POINTER) for name in ("starts", "lengths", "blocks", "slots")),
    )


class Tokens(ctypes.Structure):
    """Query, key and value of a step's tokens; key and value may be None. Strides in floats."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value")),
        *((name, _LONG) for name in ("query_stride", "key_stride", "value_stride")),
    )


class NativeLibrary:
    """The kernels of one shared library.

    Raises:
        OSError: the file is no library that can be loaded here.
        AttributeError: it lacks a kernel.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._linear = library.twostroke_linear
        self._linear.argtypes = [_POINTER] * 4 + [_LONG] * 3 + [_INT]
        self._norm = library.twostroke_norm
        self._norm.argtypes = [_POINTER] * 2 + [_FLOAT, _POINTER] + [_LONG] * 2 + [_INT]
        self._gated_silu = library.twostroke_gated_silu
        self._gated_silu.argtypes = [_POINTER] * 2 + [_LONG] * 2 + [_INT]
        self._rotate = library.twostroke_rotate
        self._rotate.argtypes = [_POINTER, _LONG] + [_POINTER] * 3 + [_LONG] * 3 + [_INT]
        self._attend = library.twostroke_attend
        structures = [ctypes.POINTER(structure) for structure in (Layer, Step, Tokens)]
        self._attend.argtypes = [*structures, _POINTER, _LONG, _POINTER, _INT]
        for function in (self._linear, self._norm, self._gated_silu, self._rotate, self._attend):
            function.restype = None

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``rows @ weight.T + bias`` in new memory, all float32, dense and on the CPU."""
        num_rows, num_inputs = rows.shape
        num_outputs = weight.shape[0]
        product = rows.new_empty((num_rows, num_outputs))
        pointers = rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), product.data_ptr()
        self._linear(*pointers, num_rows, num_outputs, num_inputs, torch.get_num_threads())
        return product

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """``rows / sqrt(mean(rows²) + epsilon) * weight`` over the last dimension, in new memory; as :meth:`linear`."""
        normed, size = torch.empty_like(rows), weight.shape[0]
        num_rows = rows.numel() // size
        pointers = rows.data_ptr(), weight.data_ptr()
        self._norm(*pointers, epsilon, normed.data_ptr(), num_rows, size, torch.get_num_threads())
        return normed

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` ``[num_rows, size]`` of ``gate_up`` ``[num_rows, 2 * size]``, in new memory."""
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        product = gate_up.new_empty((num_rows, size))
        self._gated_silu(gate_up.data_ptr(), product.data_ptr(), num_rows, size, torch.get_num_threads())
        return product

    def rotate(self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """As :func:`~twostroke.engine.models.rope.rotate`; each token's heads are adjacent, cosines and sines dense."""
        rotated = heads.new_empty(heads.shape)
        pointers = cosines.data_ptr(), sines.data_ptr(), rotated.data_ptr()
        self._rotate(heads.data_ptr(), heads.stride(0), *pointers, *heads.shape, torch.get_num_threads())
        return rotated

    def attend(self, layer: Layer, step: Step, tokens: Tokens, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """Store what ``tokens`` bring in ``kv_cache``, then attend into ``output``; both float32 and dense."""
        self._attend(
            layer, step, tokens, kv_cache.data_ptr(), kv_cache.stride(0), output.data_ptr(), torch.get_num_threads()
        )


def load_native(purpose: str = "products and attention") -> NativeLibrary | None:
    """The kernels, compiled if need be; None where they can't be had, which is logged and no error: torch computes.

    ``purpose`` is what they are wanted for, as the log says it.
    """
    try:
        path = compiled_library()
        try:
            return NativeLibrary(path)
        except (OSError, AttributeError) as error:
            path.unlink(missing_ok=True)  # compiled anew next time
            raise NotCompiled(f"{path} can't be loaded: {error}") from error
    except (NotCompiled, OSError) as error:
        logger.info("%s on the CPU: computed by torch, without native kernels: %s", purpose, error)
        return None
