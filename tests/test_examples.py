"""Every example runs as it stands, on a CPU, and prints what it says it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SHOWN = {
    "async_loop.py": ["The capital of France is Paris", "three, four, five"],
    "embed_in_asyncio.py": ["Paris", "aborts the request"],
    "embed_own_scheduler.py": ["1 tokens, 5 tokens, 10 tokens, 20 tokens, 30 tokens"],
    "quickstart.py": ["step of {", "The capital of France is"],
    "streaming.py": ["Name three colours.", "What is a state machine?", "Count from one to ten."],
}


def run(script: Path, *arguments: str) -> str:
    """What a script prints; it sees no GPU."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.stem, marks=[pytest.mark.model] if "smollm2" in script.read_text() else [])
        for script in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_an_example_runs(script: Path) -> None:
    printed = run(script)
    assert printed.strip()
    for text in SHOWN.get(script.name, ()):
        assert text in printed


def test_the_loop_benchmark_compares_with_its_limits() -> None:
    sizes = ["--requests", "4", "--tokens", "8", "--rounds", "1", "--forward-ms", "2"]
    printed = run(EXAMPLES / "benchmarks" / "loop_overlap.py", *sizes)
    assert "of sync (limit 1.10)" in printed
    assert printed.count("of it while the device was busy") == 2


@pytest.mark.model
def test_the_server_benchmark_compares_with_the_loop() -> None:
    pytest.importorskip("uvicorn")
    printed = run(EXAMPLES / "benchmarks" / "serve_overhead.py", "--quick")
    assert "limit 1.10" in printed
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith("loop alone")] == ["1.000"]
    assert "between tokens: p50" in printed
