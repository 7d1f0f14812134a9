"""New weights between steps, in place, all or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driver import Driver, Wish, serve_alone
from twostroke.engine.model_runner import ModelRunner
from twostroke.engine.models import Decoder, WeightsError, random_model, tiny_config
from twostroke.fsm import InputRefused, StepStateError
from twostroke.stages.forward_context import Model

WISH = Wish("a", (1, 2, 3, 4), 6)


@pytest.fixture
def own_model() -> Decoder:
    """A model that no other test sees."""
    return random_model(tiny_config(), seed=1)


@pytest.fixture
def other() -> Decoder:
    return random_model(tiny_config(), seed=2)


def test_the_next_step_uses_them(make_runner: Callable[..., ModelRunner], own_model: Decoder, other: Decoder) -> None:
    runner = make_runner(own_model)
    before = serve_alone(runner, WISH)
    runner.update_weights(other.parameters.items())
    after = serve_alone(runner, WISH)
    assert after.tokens != before.tokens
    after.assert_equals(serve_alone(make_runner(other), WISH), tolerance=1e-6)


def test_some_of_them_can_be_updated(make_runner: Callable[..., ModelRunner], own_model: Decoder) -> None:
    runner = make_runner(own_model)
    before = serve_alone(runner, WISH)
    name = "model.norm.weight"
    runner.update_weights([(name, own_model.parameters[name] * -1)])
    assert serve_alone(runner, WISH).tokens != before.tokens


def test_what_does_not_fit_is_refused_before_anything_is_written(
    make_runner: Callable[..., ModelRunner], own_model: Decoder
) -> None:
    runner = make_runner(own_model)
    before = serve_alone(runner, WISH)
    good = [(name, tensor * 3) for name, tensor in own_model.parameters.items()]
    for bad, text in ((("model.nonsense", torch.zeros(1)), "nonsense"), ((good[0][0], torch.zeros(3)), "shape")):
        with pytest.raises(WeightsError, match=text):
            runner.update_weights([*good, bad])
        serve_alone(runner, WISH).assert_equals(before, tolerance=0)


def test_refused_with_a_step_open(make_runner: Callable[..., ModelRunner], own_model: Decoder, model: Model) -> None:
    runner = make_runner(own_model)
    driver = Driver(runner)
    driver.add(WISH)
    runner.execute_model(driver.output({"a": 4}))
    with pytest.raises(StepStateError, match="FORWARDED"):
        runner.update_weights(own_model.parameters.items())


def test_a_model_that_cannot_be_written_says_so(make_runner: Callable[..., ModelRunner], own_model: Decoder) -> None:
    class Foreign:
        spec = own_model.spec
        forward = own_model.forward
        compute_logits = own_model.compute_logits

    with pytest.raises(InputRefused, match="Foreign"):
        make_runner(Foreign()).update_weights([])
