"""Compiles the C sources of this folder, once for a machine, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import which

import torch

from ...fsm.errors import TwoStrokeError
from ..cache_folder import cache_folder

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

    Its name holds a checksum of sources, flags, compiler and torch's OpenMP, and it ends with one of itself, so what is
    found fits and is whole. It is put in place at once: processes that start together may each compile it, and none
    loads half of it. Since it is code, nothing is taken from where another user may write.

    Raises:
        NotCompiled: another kind of processor, no compiler, one that fails, or a cache folder that can't be written or
            is not this user's alone.
    """
    _require_processor()
    compiler = _compiler()
    openmp = _openmp_of_torch()
    try:
        path = cache_folder() / f"native-{_checksum(compiler, openmp)}.so"
    except RuntimeError as error:
        raise NotCompiled(f"there is no cache folder: {error}") from error
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(path.parent)
        if not _is_whole(path):
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}.") as folder:
                made = _compile(compiler, openmp, Path(folder))
                _seal(made)
                made.replace(path)
        _require_own(path)
    except OSError as error:
        raise NotCompiled(f"{path} can't be written: {error}") from error
    return path


def _require_own(path: Path) -> None:
    """Whoever may write there could have this process run what he likes."""
    state = path.stat()
    if state.st_uid not in (0, os.geteuid()) or state.st_mode & stat.S_IWOTH:
        raise NotCompiled(
            f"{path} belongs to user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):o}: it must belong to user "
            f"{os.geteuid()} or root, and others must not write there; name another folder in XDG_CACHE_HOME"
        )


def _seal(library: Path) -> None:
    """Add a checksum of the library at its end, which loaders don't look at: half a library would end the process."""
    content = library.read_bytes()
    library.write_bytes(content + hashlib.sha256(content).digest())
    library.chmod(0o755)  # whatever the umask


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    size = len(content) - hashlib.sha256().digest_size
    return content[size:] == hashlib.sha256(content[:size]).digest()


def _require_processor() -> None:
    machine, capability = platform.machine(), torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64") or capability not in ("AVX2", "AVX512"):
        raise NotCompiled(f"they are for Linux on x86-64 with AVX2, and this is {sys.platform} on {machine}")


def _compiler() -> tuple[str, ...]:
    """The command: CC may name what goes before the compiler, or options behind it."""
    wanted = os.environ.get("CC", "").split()
    found = next((path for path in map(which, wanted[:1] or COMPILERS) if path), None)
    if found is None:
        names = ", ".join(wanted[:1] or COMPILERS)
        raise NotCompiled(f"there is no C compiler ({names}); install gcc or name one in the variable CC")
    return found, *wanted[1:]


def _openmp_of_torch() -> Path | None:
    """The OpenMP that torch brings along. To use it too makes its threads and the kernels' the same ones."""
    return next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)


def _checksum(compiler: Sequence[str], openmp: Path | None) -> str:
    """Of all that decides what the library is; a compiler is known by its file."""
    parts = [*FLAGS, *compiler[1:], "" if openmp is None else openmp.name]
    for found in filter(None, map(which, compiler)):
        real = Path(found).resolve()
        parts += [str(real), str(real.stat().st_size), str(real.stat().st_mtime_ns)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted((*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: Sequence[str], openmp: Path | None, folder: Path) -> Path:
    """The library in ``folder``; without threads where compiler and torch's OpenMP don't go together."""
    if openmp is not None:
        try:
            return _build(compiler, (OPENMP,), (str(openmp),), folder)
        except NotCompiled:
            pass  # such as a compiler that calls another OpenMP by other names
    return _build(compiler, (), (), folder)


def _build(compiler: Sequence[str], flags: Sequence[str], libraries: Sequence[str], folder: Path) -> Path:
    # Linked without the flag: that would add the compiler's own OpenMP, and with it a second set of threads.
    objects = [str(folder / f"{source.stem}.o") for source in sorted(_FOLDER.glob("*.c"))]
    for source, target in zip(sorted(_FOLDER.glob("*.c")), objects, strict=True):
        _run([*compiler, *FLAGS, *flags, "-c", str(source), "-o", target])
    library = folder / "native.so"
    _run([*compiler, "-shared", "-Wl,-z,defs", *objects, *libraries, "-lm", "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{command[0]} can't be run: {error}") from error
    if done.returncode:
        raise NotCompiled(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
