"""A tiny random model, runners over it in every mode, and what each request gets when it is served alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from driver import Served, Wish, serve_alone
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.forward_context import Model


@pytest.fixture(scope="session")
def model() -> Model:
    """Two layers, float32."""
    return random_model(tiny_config())


@pytest.fixture(scope="session")
def make_runner(model: Model) -> Callable[..., ModelRunner]:
    """A ready runner over the tiny model; keyword arguments change the configuration."""

    def make(model: Model = model, **changes: Any) -> ModelRunner:
        return build_runner(EngineConfig(**{**LIMITS, **changes}), model=model)

    return make


@pytest.fixture
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    """An eager runner."""
    return make_runner()


@pytest.fixture(scope="session")
def wishes() -> list[Wish]:
    """One request for each kind of sampling, of different lengths."""
    return [
        Wish(name, tuple((7 * i + 3 * j) % 60 for j in range(3 + 2 * i % 9)), 4 + i % 4, params)
        for i, (name, params) in enumerate(PARAMS.items())
    ]


@pytest.fixture(scope="session")
def alone(make_runner: Callable[..., ModelRunner], wishes: list[Wish]) -> dict[str, Served]:
    """What each of ``wishes`` gets alone, eager and unchunked."""
    runner = make_runner()
    return {wish.req_id: serve_alone(runner, wish) for wish in wishes}
