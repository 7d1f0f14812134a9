"""Stages by name: modules, files, entry points, what a configuration names, and every way to get it wrong."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, Wish
from twostroke.engine.config import EngineConfig, InvalidConfig
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.plugins import PluginError, find_stage, load_stage, split_extra, split_stage
from twostroke.fsm import StepStateError, WiringError
from twostroke.stages.sampling_params import SamplingParams


def tokens_of(runner: ModelRunner, **extra: Any) -> tuple[int, ...]:
    """What a request gets in three steps."""
    driver = Driver(runner)
    driver.add(Wish("r", (1, 2, 3), 3, SamplingParams(temperature=0, extra=extra)))
    driver.step({"r": 3})
    driver.step({"r": 1})
    driver.step({"r": 1})
    tokens = tuple(driver.requests["r"].outputs)
    driver.finish("r")
    driver.step({})
    return tokens


def offer(monkeypatch: pytest.MonkeyPatch, **stages: str) -> None:
    """Pretend that packages are installed which offer these stages."""
    offered = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name.rstrip("_"), target, "twostroke.stages") for name, target in stages.items()
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: offered.select(group=group))


def test_a_stage_by_module_file_and_entry_point(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, fixed="my_stages:Fixed")
    by_module = find_stage("my_stages:Fixed")
    assert find_stage("fixed") is by_module
    by_file = find_stage(f"{plugin}:Fixed")
    assert by_file.__doc__ == by_module.__doc__
    assert find_stage(f"{plugin}:Fixed") is by_file, "a file is run once"
    assert find_stage("my_stages:Fixed.__call__") is by_module.__call__


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("nobody", "no entry point of the group 'twostroke.stages' \\(known: other\\)", id="entry_point"),
        pytest.param("no_such_package:A", "no_such_package can't be imported: ModuleNotFoundError", id="module"),
        pytest.param("my_stages:Absent", "there is no 'Absent' in my_stages", id="attribute"),
        pytest.param("missing.py:A", "missing.py can't be imported: FileNotFoundError", id="file"),
        pytest.param(":A", "write package.module:name", id="empty"),
        pytest.param("my_stages:Broken", "can't be made: OSError: no licence", id="constructor"),
        pytest.param("my_stages:NOT_A_STAGE", "is a int, which can't be called", id="no_callable"),
        pytest.param("my_stages:Chosen", "needs the parts of a runner", id="no_parts"),
    ],
)
def test_what_cannot_be_loaded_says_why(spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, other="my_stages:Fixed")
    with pytest.raises(PluginError, match=message) as raised:
        load_stage(spec)
    assert spec in str(raised.value)


@pytest.mark.usefixtures("plugin")
def test_an_entry_point_with_two_meanings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, fixed="my_stages:Fixed", fixed_="my_stages:Chosen")
    with pytest.raises(PluginError, match="more than once: my_stages:Chosen, my_stages:Fixed"):
        find_stage("fixed")


@pytest.mark.usefixtures("plugin")
def test_a_module_that_fails_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "bad_module.py").write_text("1 / 0")
    for spec in ("bad_module:A", f"{tmp_path / 'bad_module.py'}:A"):
        with pytest.raises(PluginError) as raised:
            find_stage(spec)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("plugin")
def test_a_configuration_puts_stages_in_place(make_runner: Callable[..., ModelRunner]) -> None:
    assert tokens_of(make_runner(stages=[("sample", "my_stages:Fixed")])) == (5, 5, 5)
    runner = make_runner(stages={"sample": "my_stages:Chosen", "after:update_states": "my_stages:Probe"})
    assert tokens_of(runner, token=9) == (9, 9, 9)
    assert tokens_of(runner) == (0, 0, 0)
    assert runner.stages.names[1] == "probe"
    assert find_stage("my_stages:Probe").count == 6


@pytest.mark.usefixtures("plugin")
def test_a_place_may_be_named_twice(make_runner: Callable[..., ModelRunner]) -> None:
    pairs = [("before:commit", "my_stages:wide"), ("before:commit", "my_stages:Probe")]
    assert make_runner(stages=pairs).stages.names[-3:] == ("wide", "probe", "commit")


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("place", ["smaple", "after:nothing"])
def test_a_place_that_is_not_there_names_those_that_are(make_runner: Callable[..., ModelRunner], place: str) -> None:
    with pytest.raises(WiringError, match=r"there is no stage '(smaple|nothing)'.*update_states"):
        make_runner(stages=[(place, "my_stages:Fixed")])


@pytest.mark.usefixtures("plugin")
def test_a_stage_that_does_not_fit_says_record_and_order(make_runner: Callable[..., ModelRunner]) -> None:
    with pytest.raises(WiringError, match=r"'commit' needs SamplerOutput.*order: .*sample"):
        make_runner(stages=[("sample", "my_stages:wide")])


@pytest.mark.parametrize("stages", [3, ["sample"], [("sample", 3)], [("a", "b", "c")]])
def test_stages_of_another_form_are_refused(make_runner: Callable[..., ModelRunner], stages: Any) -> None:
    with pytest.raises(InvalidConfig, match="stages must be pairs"):
        make_runner(stages=stages)


def test_a_configuration_with_stages_can_be_compared_and_changed() -> None:
    config = EngineConfig(stages={"sample": "a:B"})
    assert config.stages == (("sample", "a:B"),)
    assert config == EngineConfig(stages=[("sample", "a:B")])
    assert config.replace(seed=1).stages == config.stages


@pytest.mark.parametrize("text", ["sample", "=a:B", "sample="])
def test_a_stage_on_the_command_line_has_two_sides(text: str) -> None:
    assert split_stage("sample=a:B=C") == ("sample", "a:B=C")
    with pytest.raises(PluginError, match="PLACE=SPEC"):
        split_stage(text)


def test_an_extra_on_the_command_line_is_json_or_a_string() -> None:
    assert list(map(split_extra, ["k=8", "k=0.5", "k=[1, 2]", "k=abc", "k="])) == [
        ("k", 8),
        ("k", 0.5),
        ("k", [1, 2]),
        ("k", "abc"),
        ("k", ""),
    ]
    with pytest.raises(PluginError, match="NAME=VALUE"):
        split_extra("k")


@pytest.mark.usefixtures("plugin")
def test_stages_are_swapped_between_steps_only(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(cudagraph_mode="FULL", cudagraph_capture_sizes=(4, 8))
    driver = Driver(runner)
    driver.add(Wish("r", (1, 2, 3), 3))
    output = driver.output({"r": 3})
    runner.execute_model(output)
    with pytest.raises(StepStateError):
        runner.stages.replace("sample", load_stage("my_stages:Fixed"))
    driver.launched(output, runner.sample_tokens())
    with runner.stages.restored():
        runner.stages.replace("sample", load_stage("my_stages:Fixed"))
        assert len(runner.parts.graphs.captured), "no graph depends on the sampler"
        driver.step({"r": 1})
        runner.stages.wrap("preprocess", lambda stage: lambda *records: stage(*records))
        driver.step({"r": 1})
    assert driver.requests["r"].outputs[1] == 5
    assert not len(runner.parts.graphs.captured)
    assert any("preprocess" in reason for _, reason in runner.parts.dispatch.counts), runner.parts.dispatch.counts
