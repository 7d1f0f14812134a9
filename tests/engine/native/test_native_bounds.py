"""No kernel touches memory beyond its tensors: a program of its own, which would end with a signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "support" / "guarded_native.py"


def test_nothing_beyond_a_tensor_is_touched() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "150"], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert done.stdout.strip() in ("done", "no native kernels")
