"""Runners over a tiny random model, and a package with stages for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from modes import LIMITS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.stages.forward_context import Model

PLUGIN = '''
from twostroke.stages.columns import NumberColumn
from twostroke.stages.records import Batch, ExecuteModelState, PreparedInputs, SamplerOutput


class Fixed:
    """Samples token 5, always."""

    def __call__(self, inputs: PreparedInputs, state: ExecuteModelState) -> SamplerOutput:
        return SamplerOutput(state.logits.new_full((len(inputs.sampling_reqs),), 5).long())


class Chosen(NumberColumn):
    """Samples the token that each request asks for."""

    @classmethod
    def from_runner(cls, parts):
        stage = cls("token", parts.table.num_rows, default=0, low=0, high=63)
        parts.table.add_column(stage)
        return stage

    def __call__(self, batch: Batch, inputs: PreparedInputs, state: ExecuteModelState) -> SamplerOutput:
        rows = batch.rows[inputs.sampling_reqs]
        return SamplerOutput(state.logits.new_tensor(self.values[rows]).long())


class Probe:
    """Counts steps."""

    count = 0

    def __call__(self, batch: Batch) -> None:
        type(self).count += 1


def wide(state: ExecuteModelState) -> ExecuteModelState:
    return state


class Broken:
    def __init__(self):
        raise OSError("no licence")


NOT_A_STAGE = 3
'''


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
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of an importable module ``my_stages``."""
    file = tmp_path / "my_stages.py"
    file.write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("my_stages", None)
