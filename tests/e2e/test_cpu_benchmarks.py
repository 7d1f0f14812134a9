"""The benchmarks of a CPU print what they say they do; what they measure is not looked at, but for sizes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "examples" / "benchmarks"


def run(script: str, *arguments: str) -> str:
    """What a script prints; it sees no GPU."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def mebibytes(printed: str, name: str) -> float:
    """The size in the line that begins with ``name``."""
    found = re.search(rf"^  {re.escape(name)} +(-?[\d.]+) MiB", printed, re.MULTILINE)
    assert found is not None, f"no line {name!r} in {printed}"
    return float(found[1])


def test_tables_of_long_requests_take_little_more_than_their_ids() -> None:
    printed = run("memory.py", "--only", "tables")
    ids = mebibytes(printed, "the ids themselves")
    assert ids == 2
    parts = ("token table", "block tables", "prompts kept by the requests", "sampling columns", "input buffers")
    total = mebibytes(printed, "all of it")
    assert total == pytest.approx(sum(mebibytes(printed, part) for part in parts), abs=0.05)
    assert total < 4 * ids
    assert mebibytes(printed, "growth of the process") < 10 * ids


def test_many_steps_leave_nothing_behind() -> None:
    printed = run("memory.py", "--only", "growth", "--steps", "2000")
    assert printed.count("  step ") == 10
    (steps,) = re.findall(r"growth over (\d+) steps", printed)
    assert mebibytes(printed, f"growth over {steps} steps") < 4


@pytest.mark.model
def test_the_table_has_a_line_for_every_figure() -> None:
    printed = run("cpu_table.py", "--rounds", "1", "--steps", "100")
    table = printed.partition("<!-- cpu-table -->")[2].partition("<!-- /cpu-table -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert lines[0] == "| what | figure | measured by | ratio |"
    assert all(re.search(r"\| -?\d+\.\d\d \|$", line) for line in lines[1:])
    for text in ("offline", "single stream", "256 requests", "limit 0.6 ms", "grown when loaded", "growth over"):
        assert text in table
