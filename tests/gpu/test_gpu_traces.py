"""Recordings of vLLM's runner, replayed on the GPU in float32, by eager steps and by graphs: see :mod:`vllm_traces`."""

from __future__ import annotations

from pathlib import Path

import pytest
from twostroke.engine.loading import LoadedModel, load_model
from vllm_traces import SCENARIOS, check_replay

pytestmark = [pytest.mark.gpu, pytest.mark.model]


@pytest.fixture(scope="module")
def on_gpu() -> LoadedModel:
    return load_model("smollm2", device="cuda", dtype="float32")


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_token_and_logprob_of_a_recorded_run(
    scenario: str, mode: str, data_path: Path, on_gpu: LoadedModel
) -> None:
    check_replay(on_gpu.model, data_path / "vllm_traces" / f"{scenario}.jsonl", cudagraph_mode=mode)
