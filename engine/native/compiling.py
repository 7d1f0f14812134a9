"""Compiles the C sources of this folder, once for a machine, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import which

import torch

from ...fsm.errors import TwoStrokeError

COMPILERS = ("cc", "gcc", "clang")
"""Where the variable CC names no compiler."""

FLAGS = ("-O3", "-mavx2", "-mfma", "-fPIC", "-std=gnu11")
OPENMP = "-fopenmp"
TIMEOUT_S = 120

_FOLDER = Path(__file__).parent


class NotCompiled(TwoStrokeError, RuntimeError):
    """The kernels can't be had on this machine; the message says what is missing."""


def compiled_library() -> Path:
    """The shared library, compiled if it is not there yet: some 2 seconds.

    Its name holds a checksum of sources, flags, compiler and torch's OpenMP, so what is found fits. It is put in place
    whole: processes that start at once may each compile it, and none loads half of it.

    Raises:
        NotCompiled: another kind of processor, no compiler, one that fails, or a cache folder that can't be written.
    """
    _require_processor()
    compiler = _compiler()
    openmp = _openmp_of_torch()
    path = _cache_folder() / f"native-{_checksum(compiler, openmp)}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}.") as folder:
                _compile(compiler, openmp, Path(folder)).replace(path)
        except OSError as error:
            raise NotCompiled(f"{path} can't be written: {error}") from error
    return path


def _require_processor() -> None:
    machine, capability = platform.machine(), torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64") or capability not in ("AVX2", "AVX512"):
        raise NotCompiled(f"they are for Linux on x86-64 with AVX2, and this is {sys.platform} on {machine}")


def _compiler() -> Path:
    wanted = os.environ.get("CC", "").split()[:1] or COMPILERS
    found = next((path for path in map(which, wanted) if path), None)
    if found is None:
        raise NotCompiled(f"there is no C compiler ({', '.join(wanted)}); install gcc or name one in the variable CC")
    return Path(found)


def _openmp_of_torch() -> Path | None:
    """The OpenMP that torch brings along. To use it too makes its threads and the kernels' the same ones."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke"
    except RuntimeError as error:  # no home
        raise NotCompiled(f"there is no cache folder: {error}") from error


def _checksum(compiler: Path, openmp: Path | None) -> str:
    """Of all that decides what the library is; a compiler is known by its file."""
    real = compiler.resolve()
    stat = real.stat()
    parts = [*FLAGS, str(real), str(stat.st_size), str(stat.st_mtime_ns), "" if openmp is None else openmp.name]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted((*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: Path, openmp: Path | None, folder: Path) -> Path:
    """The library in ``folder``; without threads where compiler and torch's OpenMP don't go together."""
    if openmp is not None:
        try:
            return _build(compiler, (OPENMP,), (str(openmp),), folder)
        except NotCompiled:
            pass  # such as a compiler that calls another OpenMP by other names
    return _build(compiler, (), (), folder)


def _build(compiler: Path, flags: Sequence[str], libraries: Sequence[str], folder: Path) -> Path:
    # Linked without the flag: that would add the compiler's own OpenMP, and with it a second set of threads.
    objects = [str(folder / f"{source.stem}.o") for source in sorted(_FOLDER.glob("*.c"))]
    for source, target in zip(sorted(_FOLDER.glob("*.c")), objects, strict=True):
        _run([str(compiler), *FLAGS, *flags, "-c", str(source), "-o", target])
    library = folder / "native.so"
    _run([str(compiler), "-shared", "-Wl,-z,defs", *objects, *libraries, "-lm", "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{command[0]} can't be run: {error}") from error
    if done.returncode:
        raise NotCompiled(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
