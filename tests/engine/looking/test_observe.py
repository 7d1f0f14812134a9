"""Hooks on activations: the right rows of the right request in every mode, and nothing changed but what is meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver import GREEDY, Driver, Served, Wish
from modes import MODES
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models import Decoder
from twostroke.engine.observe import OBSERVED, Activation
from twostroke.fsm import InputRefused, StageFailed
from twostroke.stages.records import CUDAGraphMode

GRAPHS: dict[str, Any] = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": (1, 2, 4, 8, 16)}
Key = tuple[str, str, int]


class Rows:
    """Keeps a copy of every row by name, request and position."""

    def __init__(self) -> None:
        self.rows: dict[Key, torch.Tensor] = {}

    def __call__(self, activation: Activation) -> None:
        assert len(activation.tensor) == len(activation.positions) == activation.query_start_loc[-1]
        assert len(activation.query_start_loc) == len(activation.req_ids) + 1
        for req_id in activation.req_ids:
            positions = activation.positions[activation.rows(req_id)].tolist()
            for position, row in zip(positions, activation.of(req_id), strict=True):
                self.rows[activation.name, req_id, position] = row.clone()


@pytest.fixture(scope="module")
def alone_rows(make_runner: Callable[..., ModelRunner], wishes: list[Wish]) -> dict[Key, torch.Tensor]:
    """Every row of every request that is served by itself, unchunked."""
    seen = Rows()
    runner = make_runner()
    with runner.observe("*", seen):
        driver = Driver(runner)
        for wish in wishes:
            driver.add(wish)
            driver.step({wish.req_id: len(wish.prompt)})
            while len(driver.requests[wish.req_id].outputs) < wish.max_tokens:
                driver.step({wish.req_id: 1})
            driver.finish(wish.req_id)
            driver.step({})
    return seen.rows


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_those_of_the_request_alone(
    make_runner: Callable[..., ModelRunner],
    wishes: list[Wish],
    alone: dict[str, Served],
    alone_rows: dict[Key, torch.Tensor],
    mode: str,
) -> None:
    """Padding, chunks, preemption, micro-batches that cut requests: each row is its own, and no token changes."""
    runner, seen = make_runner(**MODES[mode]), Rows()
    with runner.observe("*", seen) as handle:
        got = Driver(runner, 7).run_random(wishes)
    for req_id, served in got.items():
        served.assert_equals(alone[req_id])
    assert handle.num_failures == 0
    assert {key[0] for key in seen.rows} == set(runner.observable)
    wanted = {key for key in alone_rows if key[0] != "logits"}
    assert {key for key in seen.rows if key[0] != "logits"} == wanted
    for key, row in seen.rows.items():
        if key in alone_rows:  # chunks that are cut elsewhere have logits of other prompt positions
            torch.testing.assert_close(row, alone_rows[key], atol=1e-4, rtol=1e-4)


def test_hidden_states_add_up(make_runner: Callable[..., ModelRunner]) -> None:
    """What the names say: residual = residual before + attention + mlp, norm and logits follow from the last one."""
    runner, seen = make_runner(), Rows()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.observe("*", seen):
        driver.step({"a": 3})

    def row(name: str) -> torch.Tensor:
        return seen.rows[name, "a", 2]

    before = row("embedding")
    for layer in (0, 1):
        after = before + row(f"layers.{layer}.attention") + row(f"layers.{layer}.mlp")
        torch.testing.assert_close(row(f"layers.{layer}.residual"), after)
        before = row(f"layers.{layer}.residual")
    assert int(row("logits").argmax()) == driver.requests["a"].outputs[0]


@pytest.mark.parametrize("mode", MODES)
def test_editing_one_request_leaves_its_neighbours_alone(
    make_runner: Callable[..., ModelRunner], wishes: list[Wish], alone: dict[str, Served], mode: str
) -> None:
    """Two modes agree on what steering does to the steered request, too."""

    def steer(activation: Activation) -> torch.Tensor:
        edited = activation.tensor.clone()
        edited[activation.rows("greedy")] += 0.5
        return edited

    served = []
    for changes in ({}, MODES[mode]):
        runner = make_runner(**changes)
        with runner.observe("layers.0.residual", steer, edit=True):
            got = Driver(runner, 3).run_random(wishes)
        for req_id, own in got.items():
            if req_id != "greedy":
                own.assert_equals(alone[req_id])
        served.append(got["greedy"])
    served[1].assert_equals(served[0])
    assert abs(served[0].logprobs[0] - alone["greedy"].logprobs[0]).max() > 0.01


def test_editing_logits_steers_the_draw(make_runner: Callable[..., ModelRunner]) -> None:
    def only_nine(activation: Activation) -> torch.Tensor:
        edited = torch.full_like(activation.tensor, -10.0)
        edited[:, 9] = 10.0
        return edited

    runner = make_runner(**GRAPHS)
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    driver.step({"a": 3})
    with runner.observe("logits", only_nine, edit=True):
        driver.step({"a": 1})
    assert driver.requests["a"].outputs[1] == 9
    assert (CUDAGraphMode.FULL, "best configured") in runner.parts.dispatch.counts, "logits need no eager step"


def test_graphs_wait_while_something_inside_is_observed(make_runner: Callable[..., ModelRunner]) -> None:
    runner = make_runner(**GRAPHS)
    driver, counts = Driver(runner), runner.parts.dispatch.counts
    driver.add(Wish("a", (1, 2, 3), 9, GREEDY))
    driver.step({"a": 3})
    num_graphs = len(runner.parts.graphs.captured)
    first = runner.observe("norm", Rows())
    second = runner.observe("layers.1.*", Rows())
    driver.step({"a": 1})
    assert counts[CUDAGraphMode.NONE, OBSERVED] == 1
    first.close()
    first.close()
    driver.step({"a": 1})
    assert counts[CUDAGraphMode.NONE, OBSERVED] == 2
    second.close()
    driver.step({"a": 1})
    assert counts[CUDAGraphMode.NONE, OBSERVED] == 2
    assert counts[CUDAGraphMode.FULL, "best configured"] == 1
    assert len(runner.parts.graphs.captured) == num_graphs
    assert len(runner.observers) == 0


def test_graphs_captured_while_observed_hold_no_hook(make_runner: Callable[..., ModelRunner]) -> None:
    runner, seen = make_runner(**GRAPHS), Rows()
    with runner.observe("*", seen):
        runner.capture_model()
        runner.dummy_run(2)
    assert seen.rows == {}
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 9, GREEDY))
    driver.step({"a": 3})
    assert seen.rows == {}
    assert len(driver.requests["a"].outputs) == 1


def test_a_reading_hook_that_raises_fails_no_step(
    make_runner: Callable[..., ModelRunner], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(activation: Activation) -> None:
        raise ZeroDivisionError("a bug of the hook")

    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.observe("layers.*.mlp", broken) as handle:
        driver.step({"a": 3})
    assert (handle.num_calls, handle.num_failures) == (2, 2)
    assert caplog.text.count("is not logged again") == 1


@pytest.mark.parametrize("wrong", ["raise", "shape", "text"])
def test_an_editing_hook_that_goes_wrong_fails_the_step_and_undoes_it(
    make_runner: Callable[..., ModelRunner], wrong: str
) -> None:
    def edit(activation: Activation) -> Any:
        if wrong == "raise":
            raise ZeroDivisionError("a bug of the hook")
        return activation.tensor[:1] if wrong == "shape" else "text"

    runner = make_runner()
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    scheduled = driver.output({"a": 3})
    with runner.observe("layers.0.attention", edit, edit=True), pytest.raises(StageFailed, match="forward"):
        runner.execute_model(scheduled)
    driver.run(scheduled)
    assert len(driver.requests["a"].outputs) == 1


def test_an_edit_of_none_changes_nothing(make_runner: Callable[..., ModelRunner], wishes: list[Wish]) -> None:
    unhooked = Driver(make_runner(), 2).run_random(wishes)
    runner = make_runner()
    with runner.observe("*", lambda activation: None, edit=True):
        for req_id, served in Driver(runner, 2).run_random(wishes).items():
            served.assert_equals(unhooked[req_id], tolerance=0)


def test_an_unknown_name_lists_what_there_is(make_runner: Callable[..., ModelRunner]) -> None:
    with pytest.raises(InputRefused, match=r"'layers.7.mlp'; there are: embedding, layers.0.attention_input"):
        make_runner().observe("layers.7.mlp", lambda activation: None)


def test_a_model_that_names_nothing_shows_its_logits(make_runner: Callable[..., ModelRunner], model: Decoder) -> None:
    class Foreign:
        """The protocol and no more."""

        spec, forward, compute_logits = model.spec, staticmethod(model.forward), staticmethod(model.compute_logits)

    runner, seen = make_runner(model=Foreign()), Rows()
    assert runner.observable == ("logits",)
    driver = Driver(runner)
    driver.add(Wish("a", (1, 2, 3), 4, GREEDY))
    with runner.observe("logits", seen):
        driver.step({"a": 3})
    assert list(seen.rows) == [("logits", "a", 2)]
