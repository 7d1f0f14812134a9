"""Which attention kernel for which step: measured once for a GPU and a shape of layers, and kept in a file."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from attrs import frozen

from ...stages.specs import AttentionLayerSpec
from ..attention.flashinfer_library import AttentionKernel, FlashInfer
from ..cache_folder import cache_folder
from ..kernels import decode_attention, mixed_attention

_LOG = logging.getLogger(__name__)

Times = Mapping[AttentionKernel, tuple[float, ...]]


@frozen
class AttentionTimes:
    """Microseconds of one layer by kernel, one for each case measured: ``decode`` by number of requests, ``mixed``."""

    decode: Mapping[int, Times]
    mixed: Times

    def to_json(self) -> dict[str, Any]:
        """As it is kept in a file."""
        return {"decode": {str(count): dict(times) for count, times in self.decode.items()}, "mixed": dict(self.mixed)}

    @classmethod
    def from_json(cls, data: Any) -> AttentionTimes:
        """What :meth:`to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            decode = {int(count): _times(times) for count, times in data["decode"].items()}
            mixed = _times(data["mixed"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the times of attention kernels: {data!r:.80}") from error
        if not decode or min(decode) < 1:
            raise ValueError(f"no times of decode steps: {data!r:.80}")
        return cls(decode, mixed)


def _times(data: Any) -> Times:
    times = {AttentionKernel(name): tuple(float(value) for value in values) for name, values in data.items()}
    if len({len(values) for values in times.values()}) != 1:
        raise ValueError("not one time for every case and kernel")
    if not all(math.isfinite(value) and value > 0 for values in times.values() for value in values):
        raise ValueError("a time that is not above 0")
    return times


class MeasuredChoice:
    """The kernel with the least time in geometric mean over the cases, of the number of requests nearest by ratio."""

    def __init__(self, times: AttentionTimes) -> None:
        self.times = times
        self._mixed = _fastest(times.mixed)
        self._measured = {count: _fastest(by_kernel) for count, by_kernel in times.decode.items()}
        self._decode: dict[int, AttentionKernel] = {}

    def decode(self, num_reqs: int) -> AttentionKernel:
        """For one token of each of ``num_reqs`` requests."""
        if num_reqs not in self._decode:
            nearest = min(self._measured, key=lambda count: abs(math.log(count / num_reqs)))
            self._decode[num_reqs] = self._measured[nearest]
        return self._decode[num_reqs]

    def mixed(self) -> AttentionKernel:
        """For a step with a request of several tokens."""
        return self._mixed

    def kernels(self) -> frozenset[AttentionKernel]:
        """All that are ever chosen."""
        return frozenset({self._mixed, *self._measured.values()})


def _fastest(times: Times) -> AttentionKernel:
    return min(times, key=lambda kernel: math.prod(times[kernel]))


class TimesFile:
    """Times by key, in a JSON file. To lose it costs a measurement and nothing else: no trouble with it is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, key: str) -> AttentionTimes | None:
        """The times of ``key``, or None: not measured yet, or not readable, which is warned of."""
        data = self._load()
        if key not in data:
            return None
        try:
            return AttentionTimes.from_json(data[key])
        except ValueError as error:
            _LOG.warning("%s: %s; measured again", self.path, error)
            return None

    def write(self, key: str, times: AttentionTimes) -> None:
        """Keep them beside those of other keys. The file is replaced whole: no reader sees half of it."""
        data = self._load() | {key: times.to_json()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(data, file, indent=1)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _LOG.warning("the times of attention kernels cannot be kept, and are measured at each start: %s", error)

    def _load(self) -> dict[str, Any]:
        try:
            if not self.path.exists():
                return {}
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(data, dict):
                return data
            _LOG.warning("%s is not an object; measured again", self.path)
        except (OSError, ValueError) as error:
            _LOG.warning("%s cannot be read (%s); measured again", self.path, error)
        return {}


def times_path(device: torch.device, library: FlashInfer) -> Path:
    """The file for this GPU and these releases, in the user's cache folder.

    Instead of a version, this package's kernels have a checksum in its name: they may be edited in place.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (decode_attention, mixed_attention))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts = (gpu, f"torch{torch.__version__}", f"triton{triton.__version__}", f"flashinfer{library.version}")
    name = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "_", part) for part in (*parts, f"{zlib.crc32(sources):08x}"))
    return cache_folder() / f"attention-{name}.json"


def times_key(
    layers: tuple[AttentionLayerSpec, ...], dtype: torch.dtype, block_size: int, kernels: tuple[AttentionKernel, ...]
) -> str:
    """What the times depend on beside GPU and releases: the kinds of layers, and which kernels were compared."""
    shapes = ", ".join(
        f"{layer.num_heads}:{layer.num_kv_heads} heads of {layer.head_size}, window {layer.sliding_window}, "
        f"cap {layer.soft_cap}"
        for layer in layers
    )
    return f"{shapes}; {str(dtype).removeprefix('torch.')}, page {block_size}; {' '.join(sorted(kernels))}"


def measured_choice(file: TimesFile, key: str, measure: Callable[[], AttentionTimes]) -> MeasuredChoice:
    """By the times in the file, which are measured and kept if they are not there."""
    times = file.read(key)
    if times is None:
        times = measure()
        file.write(key, times)
    return MeasuredChoice(times)
