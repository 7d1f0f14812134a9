"""Recordings of vLLM's runner, replayed on a CPU: see :mod:`vllm_traces`."""

from __future__ import annotations

from pathlib import Path

import pytest
from twostroke.engine.loading import LoadedModel
from vllm_traces import SCENARIOS, check_replay

pytestmark = pytest.mark.model


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_token_and_logprob_of_a_recorded_run(scenario: str, data_path: Path, smollm2: LoadedModel) -> None:
    check_replay(smollm2.model, data_path / "vllm_traces" / f"{scenario}.jsonl")
