"""How the native kernels get onto a machine: compiled once, found again, and never a reason to fail."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from twostroke.engine import EngineConfig
from twostroke.engine.attention.paged_cpu import PagedCPUBackend
from twostroke.engine.backends import kernels_for
from twostroke.engine.config import InvalidConfig
from twostroke.engine.models import Decoder, random_model, tiny_config
from twostroke.engine.models.linear import Linear
from twostroke.engine.native import compiling
from twostroke.engine.native.attention import NativeCPUBackend
from twostroke.engine.native.compiling import NotCompiled, compiled_library
from twostroke.engine.native.library import load_native
from twostroke.engine.native.operations import NativeLinear
from twostroke.stages.device import HostDevice

COMPILED = None if load_native() is None else compiled_library()
needs_library = pytest.mark.skipif(COMPILED is None, reason="the native kernels can't be had on this machine")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "twostroke"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The compilers that were run, each for a file that is no library."""
    ran: list[tuple[str, ...]] = []

    def compile_nothing(compiler: tuple[str, ...], openmp: Path | None, folder: Path) -> Path:
        ran.append(compiler)
        (folder / "native.so").write_bytes(b"not a library")
        return folder / "native.so"

    monkeypatch.setattr(compiling, "_compile", compile_nothing)
    return ran


@pytest.fixture
def at_hand(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes no time: what it makes is there."""

    def copy(compiler: tuple[str, ...], openmp: Path | None, folder: Path) -> Path:
        assert COMPILED is not None, "needs_library skips"
        return Path(shutil.copy(COMPILED, folder / "native.so"))

    monkeypatch.setattr(compiling, "_compile", copy)


def script(path: Path, text: str) -> str:
    """An executable file."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def why_not(caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why torch computes."""
    with caplog.at_level(logging.INFO):
        assert load_native() is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    return record.getMessage()


def decoder(*, native: bool = True) -> Decoder:
    return random_model(tiny_config(), native=native)


@needs_library
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled_library()
    assert list(cache.iterdir()) == [path]
    monkeypatch.setattr(compiling, "_run", lambda command: pytest.fail(f"ran {command}"))
    assert compiled_library() == path
    assert load_native() is not None


@needs_library
def test_another_compiler_makes_another_library(
    cache: Path, compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled_library()
    monkeypatch.setenv("CC", script(tmp_path / "my-cc", 'exec cc "$@"'))
    assert compiled_library() != first
    assert compiled_library() != first
    assert compiled[1:] == [(str(tmp_path / "my-cc"),)]
    assert len(list(cache.iterdir())) == 2


@needs_library
@pytest.mark.parametrize("words", ["{my_cc} cc", "cc -O0"])
def test_a_compiler_of_several_words(words: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as "ccache gcc"."""
    monkeypatch.setenv("CC", words.format(my_cc=script(tmp_path / "launcher", 'exec "$@"')))
    assert load_native() is not None


@pytest.mark.usefixtures("at_hand")
@needs_library
@pytest.mark.parametrize("size", [0, 100, 8192, -100])
def test_half_a_library_is_compiled_anew(size: int, cache: Path) -> None:
    """To load one may end the process: what is missing is mapped memory."""
    path = compiled_library()
    whole = path.read_bytes()
    path.unlink()  # a file of its own: this process may have loaded the old one
    path.write_bytes(whole[:size])
    assert compiled_library() == path
    assert path.stat().st_size == len(whole)


@pytest.mark.usefixtures("at_hand")
@needs_library
@pytest.mark.parametrize("writable", ["file", "folder"])
def test_nothing_is_loaded_from_where_others_may_write(
    writable: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiled_library()
    place = path if writable == "file" else path.parent
    place.chmod(0o777)
    assert f"{place} belongs to user {os.geteuid()} with mode 777" in why_not(caplog)


@pytest.mark.usefixtures("at_hand")
@needs_library
def test_nothing_is_loaded_that_another_user_owns(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = os.geteuid() or 1
    compiled_library()
    if not os.geteuid():
        os.chown(cache, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"{cache} belongs to user {owner}" in why_not(caplog)


@needs_library
def test_a_permissive_umask_makes_nothing_that_is_refused(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert load_native() is not None
    finally:
        os.umask(before)
    assert load_native() is not None


@pytest.mark.usefixtures("at_hand")
@needs_library
def test_a_relative_cache_folder_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compiled_library().parent == tmp_path / "home" / ".cache" / "twostroke"


@needs_library
def test_processes_that_start_at_once_all_get_it(cache: Path) -> None:
    program = "from twostroke.engine.native.library import load_native; assert load_native()"
    running = [subprocess.Popen([sys.executable, "-c", program], env=dict(os.environ)) for _ in range(2)]
    assert [process.wait(100) for process in running] == [0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_library
def test_it_uses_the_openmp_of_torch() -> None:
    """One OpenMP, or two sets of threads would wait for each other."""
    program = "import torch; from twostroke.engine.native.library import load_native; load_native()"
    program += "\nprint(*{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [Path(path).parent for path in done.stdout.split()] == [Path(torch.__file__).parent / "lib"]


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler (cc, gcc, clang); install gcc or name one in the variable CC" in why_not(caplog)


@pytest.mark.parametrize(
    ("text", "reason"), [("echo this is wrong >&2; exit 1", "this is wrong"), ("exit 0", "can't be written")]
)
def test_a_compiler_that_fails(
    text: str,
    reason: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "bad-cc", text))
    assert reason in why_not(caplog)
    assert list(cache.iterdir()) == []


def test_a_compiler_without_openmp(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = 'case "$*" in *openmp*) echo no openmp >&2; exit 1;; esac; exec cc "$@"'
    monkeypatch.setenv("CC", script(tmp_path / "plain-cc", refuses))
    if load_native() is not None:
        assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("a file in the place of the folder")
    assert "can't be written" in why_not(caplog)


def test_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "no cache folder" in why_not(caplog)


@pytest.mark.parametrize(("machine", "capability"), [("aarch64", "DEFAULT"), ("x86_64", "DEFAULT")])
def test_another_processor(machine: str, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with pytest.raises(NotCompiled, match="x86-64 with AVX2"):
        compiled_library()


@needs_library
def test_a_damaged_library_is_compiled_anew(
    cache: Path, compiled: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    assert "can't be loaded" in why_not(caplog)
    assert list(cache.iterdir()) == []
    compiled_library()
    assert len(compiled) == 2


def test_a_model_without_the_kernels_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert {type(linear) for linear in decoder().weights.linears.values()} == {Linear}


@needs_library
def test_what_a_configuration_takes() -> None:
    model, device = decoder(), HostDevice()
    config = EngineConfig(max_model_len=64).resolve(model.spec)
    assert isinstance(kernels_for(model, config, device).attention, NativeCPUBackend)
    assert isinstance(kernels_for(model, evolve(config, native=False), device).attention, PagedCPUBackend)
    assert {type(linear) for linear in model.weights.linears.values()} == {NativeLinear}
    assert {type(linear) for linear in decoder(native=False).weights.linears.values()} == {Linear}


def test_half_precision_is_torchs() -> None:
    model = random_model(tiny_config(), dtype=torch.bfloat16)
    assert {type(linear) for linear in model.weights.linears.values()} == {Linear}


def test_native_is_true_or_false() -> None:
    with pytest.raises(InvalidConfig, match="native must be True or False, got 'yes'"):
        EngineConfig(native="yes").resolve(decoder().spec)  # pyright: ignore[reportArgumentType]
