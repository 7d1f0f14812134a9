"""Sleep level 2 gives the weights' memory back, and waking reads them again into the same tensors."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
from driver import Driver, Wish, serve_alone
from modes import LIMITS, MODES
from safetensors.torch import save_file
from twostroke.engine import EngineConfig, ModelRunner, build_runner
from twostroke.engine.graphs import ClosureGraphRunner
from twostroke.engine.models import Decoder, ModelLoadError, random_model, tiny_config
from twostroke.fsm import LifeState, StepStateError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model as a Hugging Face folder."""
    config = tiny_config()
    model = random_model(config)
    assert isinstance(model, Decoder)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in model.parameters.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return build_runner(EngineConfig(model=str(folder), device="cpu", **LIMITS))


def weights_bytes(runner: ModelRunner) -> int:
    assert runner.loaded is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in runner.loaded.model.weights.owned().values())


def test_W5_after_deep_sleep_everything_is_as_it_was(runner: ModelRunner) -> None:
    wish = Wish("a", (1, 2, 3, 4), 6)
    before, held = serve_alone(runner, wish), weights_bytes(runner)
    for _ in range(2):
        runner.sleep(2)
    assert weights_bytes(runner) == 0
    assert runner.parts.kv_cache.num_bytes == 0
    runner.wake_up(["kv_cache"])
    assert runner.life is LifeState.ASLEEP
    with pytest.raises(StepStateError, match="weights"):
        runner.dummy_run()
    runner.wake_up()
    assert weights_bytes(runner) == held
    assert not any(layer.any() for layer in runner.parts.kv_cache.layers)
    serve_alone(runner, wish).assert_equals(before, tolerance=0)


def test_weights_that_cannot_be_read_again_stay_asleep(runner: ModelRunner, folder: Path) -> None:
    runner.sleep(2)
    file = folder / "model.safetensors"
    file.rename(folder / "gone")
    with pytest.raises(ModelLoadError):
        runner.wake_up()
    assert runner.life is LifeState.ASLEEP
    (folder / "gone").rename(file)
    runner.wake_up()
    assert runner.life is LifeState.READY


@pytest.mark.parametrize("mode", [name for name in MODES if "cudagraph_mode" in MODES[name]])
def test_who_sleeps_holds_no_graph(mode: str) -> None:
    runner = build_runner(EngineConfig(**{**LIMITS, **MODES[mode]}), model=random_model(tiny_config()))
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 6), Wish("b", (1, 2, 3), 6))
    for count in (3, 1, 1):
        driver.step({"a": count, "b": count})
    graphs = runner.parts.graphs
    assert isinstance(graphs, ClosureGraphRunner)
    pieces = [piece for pieces in graphs._pieces.values() for piece in pieces.values()]
    held = [weakref.ref(graph) for graph in (*graphs._full.values(), *pieces)]
    del pieces
    runner.sleep()
    gc.collect()
    assert held
    assert [graph() for graph in held if graph() is not None] == []
