"""Which way imports point (engine -> stages -> fsm), what stays free of torch, and that importing does no work."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {"fsm": {"fsm"}, "stages": {"stages", "fsm"}, "engine": {"engine", "stages", "fsm"}}
FILES = sorted(path.relative_to(ROOT) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
TORCH_FREE = (
    "twostroke.fsm",
    "twostroke.stages.io",
    "twostroke.stages.errors",
    "twostroke.stages.sampling_params",
    "twostroke.engine.scheduler",
)


def imported_modules(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """``(line, dotted name)`` of each import of a file at ``path`` (relative to the root), relative ones resolved."""
    package = ("twostroke", *path.parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from .. import stages` names the package in the alias.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def wrong_arrows(path: Path, source: str) -> list[str]:
    """Imports of a file that point the wrong way, or at a package by the name of its folder."""
    wrong: list[str] = []
    for line, module in imported_modules(path, source):
        first, *rest = module.split(".")
        if first in MAY_IMPORT:
            wrong.append(f"{path}:{line}: {module} is twostroke.{module} once installed; import it relatively")
        elif first == "twostroke" and rest and rest[0] not in MAY_IMPORT[path.parts[0]]:
            wrong.append(f"{path}:{line}: {path.parts[0]} must not import {module}")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=str)
def test_arrows_point_one_way(path: Path) -> None:
    assert wrong_arrows(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fsm/a.py", "from ..stages import io"),
        ("fsm/a.py", "from .. import stages"),
        ("fsm/a.py", "import twostroke.engine"),
        ("fsm/a.py", "def f():\n    from twostroke.stages.io import SchedulerOutput"),
        ("stages/a.py", "from ..engine.config import EngineConfig"),
        ("stages/sampling/a.py", "from ...engine import config"),
        ("stages/sampling/__init__.py", "from ... import engine"),
        ("engine/a.py", "from fsm import errors"),
        ("engine/a.py", "import stages.io"),
    ],
)
def test_a_wrong_arrow_is_found(path: str, line: str) -> None:
    assert len(wrong_arrows(Path(path), line)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("fsm/a.py", "from .errors import TwoStrokeError"),
        ("stages/a.py", "from ..fsm import errors"),
        ("stages/sampling/a.py", "from ..io import GrammarOutput\nfrom ...fsm import errors"),
        ("engine/models/a.py", "from ...stages import io\nfrom ..config import EngineConfig"),
        ("engine/a.py", "import twostroke.fsm.errors\nimport torch.fx\nfrom collections import deque"),
    ],
)
def test_a_right_arrow_passes(path: str, line: str) -> None:
    assert wrong_arrows(Path(path), line) == []


def run_python(program: str, *args: str, path: Path | None = None) -> list[str]:
    """What ``program`` prints as JSON, run in a fresh interpreter (that can also import from ``path``)."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, "-c", program, *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


FIND_HEAVY = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({"torch", "transformers", "triton", "tokenizers"} & set(sys.modules))))
"""


@pytest.mark.parametrize("module", TORCH_FREE)
def test_needs_no_torch(module: str) -> None:
    assert run_python(FIND_HEAVY, module) == []


def test_a_needed_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "needs_torch.py").write_text("import torch")
    assert run_python(FIND_HEAVY, "needs_torch", path=tmp_path) == ["torch"]


FIND_WORK = """
import importlib, json, logging, os, random, signal, sys, threading
import numpy, rich.style, torch
from torch.utils._python_dispatch import TorchDispatchMode

done = []

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        done.append(f"{module} runs {func}")
        return func(*args, **(kwargs or {}))

def settings():
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "root log level": logging.root.level,
        "root log handlers": [repr(handler) for handler in logging.root.handlers],
        "random state": hash(random.getstate()),
        "numpy random state": numpy.random.get_state()[1].tobytes(),
        "torch seed": torch.initial_seed(),
        "torch threads": torch.get_num_threads(),
        "torch default dtype": torch.get_default_dtype(),
        "torch gradients": torch.is_grad_enabled(),
    }

torch.cuda._lazy_init = lambda: done.append(f"{module} initialises CUDA")
with Watch():
    module = "torch"
    torch.ones(1)  # torch sets itself up on its first operation: not what is asked here
    done.clear()
    for module in sys.argv[1:]:
        before = settings()
        importlib.import_module(module)
        after = settings()
        done += [f"{module} changes the {key}" for key in before if before[key] != after[key]]
print(json.dumps(done))
"""


def test_importing_everything_does_no_work() -> None:
    """No tensor is computed, no device is touched, no thread started, no process-wide setting changed."""
    modules = [
        ".".join(("twostroke", *(path.parent if path.stem == "__init__" else path.with_suffix("")).parts))
        for path in FILES
        if path.stem != "__main__"
    ]
    assert run_python(FIND_WORK, *modules) == []


def test_work_at_import_is_found(tmp_path: Path) -> None:
    busy = {
        "computes": ("import torch; x = torch.ones(2)", "runs aten.ones.default"),
        "seeds": ("import torch; torch.manual_seed(3)", "changes the torch seed"),
        "wakes_device": ("import torch; torch.cuda.init()", "initialises CUDA"),
        "exports": ("import os; os.environ['X'] = '1'", "changes the environment"),
        "logs": ("import logging; logging.basicConfig()", "changes the root log handlers"),
        "starts_thread": (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "changes the threads",
        ),
    }
    for name, (source, _) in busy.items():
        (tmp_path / f"{name}.py").write_text(source)
    found = run_python(FIND_WORK, *busy, path=tmp_path)
    assert [f"{name} {finding}" for name, (_, finding) in busy.items()] == found
