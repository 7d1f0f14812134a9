"""A tiny random model, runners over it, requests of every kind, and a recording of a random run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, Served, Wish, serve_alone
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import Decoder
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.recording_reader import Recording, read_recording


@pytest.fixture(scope="session")
def model() -> Decoder:
    """Two layers, float32."""
    return random_model(tiny_config())


@pytest.fixture(scope="session")
def make_runner(model: Decoder) -> Callable[..., ModelRunner]:
    """A ready runner over the tiny model; keyword arguments change the configuration."""

    def make(model: Decoder = model, device: Any = None, **changes: Any) -> ModelRunner:
        return build_runner(EngineConfig(**{**LIMITS, **changes}), model=model, device=device)

    return make


@pytest.fixture(scope="session")
def wishes() -> list[Wish]:
    """One request for each kind of sampling."""
    return [
        Wish(name, tuple((7 * i + 3 * j) % 60 for j in range(3 + 2 * i % 9)), 4 + i % 4, params)
        for i, (name, params) in enumerate(PARAMS.items())
    ]


@pytest.fixture(scope="session")
def alone(make_runner: Callable[..., ModelRunner], wishes: list[Wish]) -> dict[str, Served]:
    """What each wish gets by itself."""
    runner = make_runner()
    return {wish.req_id: serve_alone(runner, wish) for wish in wishes}


@pytest.fixture(scope="session")
def recorded_path(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A recording of a random run: chunks, preemptions, resumptions, log probabilities. Not to be changed."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    runner = make_runner()
    with runner.record(path):
        Driver(runner, 1).run_random(wishes, preempt=0.25)
    return path


@pytest.fixture(scope="session")
def recording(recorded_path: Path) -> Recording:
    """The same, read."""
    return read_recording(recorded_path)
