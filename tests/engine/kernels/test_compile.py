"""Triton's compiler takes every kernel, for GPUs that are not there: its interpreter takes more than it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
IN_ORDER = {
    "_bring_inputs_kernel",
    "_choose_kernel",
    "_copy_rows_kernel",
    "_edit_kernel",
    "_embed_rms_norm_kernel",
    "_floor_kernel",
    "_list_pages_kernel",
    "_logprobs_kernel",
    "_penalty_kernel",
    "_scatter_kernel",
    "_store_kernel",
    "_store_tokens_kernel",
    "_summary_kernel",
    "_tile_kernel",
}
"""Kernels that are launched in order; all others overlap with the one before them, and so must wait for it."""


@pytest.mark.e2e
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    program = ROOT / "tests" / "support" / "compile_kernels.py"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(program), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    waits: dict[str, set[str]] = {}
    for name, waiting in (line.split() for line in done.stdout.splitlines()):
        waits.setdefault(name, set()).add(waiting)
    sources = "\n".join(path.read_text() for path in (ROOT / "engine" / "kernels").glob("*.py"))
    kernels = set(re.findall(r"@kernel\((?:[^@]*?)\)\ndef (\w+)\(", sources))
    assert waits.keys() == kernels, f"{program} must call every kernel once"
    for name, kinds in waits.items():
        assert kinds == {str(capability >= 90 and name not in IN_ORDER)}, name
