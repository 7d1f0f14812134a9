"""Observers and profiler ranges around stages."""

import logging
import sys
from typing import Any

import pytest
import torch
from twostroke.fsm import Observers, Pipeline, StageFailed, StageObserver, StageTimes, stage
from twostroke.fsm.observers import RunObserver


class Record: ...


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def before_stage(self, name: str) -> None:
        self.heard.append(("before", name))

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        assert seconds >= 0
        self.heard.append(("after", name, type(record)))

    def stage_failed(self, name: str, error: BaseException) -> None:
        self.heard.append(("failed", name, type(error)))


class Broken(StageObserver):
    def before_stage(self, name: str) -> None:
        raise ValueError("before")

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        raise ValueError("after")

    def stage_failed(self, name: str, error: BaseException) -> None:
        raise ValueError("failed")


def pipeline(second: Any = lambda record: None) -> Pipeline:
    return Pipeline([("first", stage(Record, gives=Record)), ("second", stage(second, takes=[Record]))])


def fail(record: Record) -> None:
    raise OSError("disk")


def interrupt(record: Record) -> None:
    raise KeyboardInterrupt


def test_observers_hear_every_stage() -> None:
    one, two = Recorder(), Recorder()
    pipeline().run({}, Observers([one, two]))
    assert one.heard == [
        ("before", "first"),
        ("after", "first", Record),
        ("before", "second"),
        ("after", "second", type(None)),
    ]
    assert two.heard == one.heard


@pytest.mark.parametrize(
    ("second", "raised", "heard"), [(fail, StageFailed, OSError), (interrupt, KeyboardInterrupt, KeyboardInterrupt)]
)
def test_observers_hear_of_failures(second: Any, raised: type[BaseException], heard: type[BaseException]) -> None:
    observer = Recorder()
    with pytest.raises(raised):
        pipeline(second).run({}, [observer])
    assert observer.heard[-2:] == [("before", "second"), ("failed", "second", heard)]


def test_observers_hear_of_a_refused_result() -> None:
    observer = Recorder()
    with pytest.raises(StageFailed):
        pipeline(lambda record: 3).run({}, [observer])
    assert observer.heard[-1][:2] == ("failed", "second")


def test_an_observer_that_raises_fails_no_step_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    healthy = Recorder()
    observers = Observers([Broken(), healthy])
    with caplog.at_level(logging.ERROR):
        records = pipeline().run({}, observers)
        with pytest.raises(StageFailed) as caught:
            pipeline(fail).run({}, observers)
    assert isinstance(records[Record], Record)
    assert isinstance(caught.value.__cause__, OSError)
    assert len(healthy.heard) == 8
    assert observers.failures == 8
    assert [record.name for record in caplog.records] == ["twostroke.fsm.observers"]
    assert "before_stage of" in caplog.text
    assert "ValueError: before" in caplog.text


def test_an_interrupt_in_an_observer_is_not_swallowed() -> None:
    class Interrupted(StageObserver):
        def before_stage(self, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline().run({}, [Interrupted()])


def test_observers_can_be_added_and_removed() -> None:
    observer, other = Recorder(), Recorder()
    observers = Observers()
    assert not observers
    observers.add(observer)
    observers.add(other)
    assert list(observers) == [observer, other]
    observers.remove(observer)
    observers.remove(observer)
    pipeline().run({}, observers)
    assert (observer.heard, len(other.heard), len(observers)) == ([], 4, 1)
    assert Observers.of(observers) is observers


def test_stage_times_add_up() -> None:
    times = StageTimes()
    for _ in range(3):
        pipeline().run({}, [times])
    with pytest.raises(StageFailed):
        pipeline(fail).run({}, [times])
    assert times.calls == {"first": 4, "second": 3}
    assert times.failures == {"second": 1}
    assert set(times.seconds) == {"first", "second"}
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_the_base_observer_hears_nothing_and_does_nothing() -> None:
    class Silent(StageObserver):
        pass

    observers = Observers([Silent()])
    pipeline().run({}, observers)
    with pytest.raises(StageFailed):
        pipeline(fail).run({}, observers)
    assert observers.failures == 0


def test_stages_are_ranges_of_the_torch_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipeline(lambda record: torch.ones(2).sum() and None).run({})
    names = [event.name for event in profile.events() or ()]
    assert names.count("first") == 1
    assert names.count("second") == 1
    (second,) = (event for event in profile.events() or () if event.name == "second")
    assert any("aten::" in child.name for child in second.cpu_children)


def test_observers_and_profiler_together() -> None:
    observer = Recorder()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipeline().run({}, [observer])
    assert {"first", "second"} <= {event.name for event in profile.events() or ()}
    assert len(observer.heard) == 4


def test_without_observer_and_profiler_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[Pipeline.__module__]
    monkeypatch.setattr(module, "perf_counter", lambda: pytest.fail("timed a stage"))
    monkeypatch.setattr(module, "_run_watched", lambda *_: pytest.fail("watched a stage"))
    assert isinstance(pipeline().run({})[Record], Record)


@pytest.mark.parametrize("module", [None, type(sys)("torch")], ids=["no torch", "torch that is being imported"])
def test_torch_is_not_needed(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", module)
    assert isinstance(pipeline().run({})[Record], Record)


class Runs(RunObserver):
    def __init__(self) -> None:
        self.runs: list[tuple[tuple[str, ...], int]] = []

    def after_run(self, names: tuple[str, ...], started: int, ends: Any) -> None:
        assert [started, *ends] == sorted([started, *ends])
        self.runs.append((names, len(ends)))

    def after_stage(self, name: str, seconds: float, record: object) -> None:
        raise AssertionError("it hears of whole runs only")


@pytest.mark.parametrize("others", [(), (StageTimes(),)])
def test_a_run_observer_hears_once_of_the_stages_that_returned(others: tuple[StageObserver, ...]) -> None:
    runs = Runs()
    observers = Observers([runs, *others])
    pipeline().run({}, observers)
    with pytest.raises(StageFailed):
        pipeline(fail).run({}, observers)
    with pytest.raises(KeyboardInterrupt):
        pipeline(interrupt).run({}, observers)
    assert runs.runs == [(("first", "second"), 2), (("first", "second"), 1), (("first", "second"), 1)]
    assert observers.failures == 0


def test_a_run_observer_that_raises_fails_no_step() -> None:
    class Raises(RunObserver):
        def after_run(self, names: tuple[str, ...], started: int, ends: Any) -> None:
            raise ValueError("run")

    observers = Observers([Raises()])
    pipeline().run({}, observers)
    assert observers.failures == 1
