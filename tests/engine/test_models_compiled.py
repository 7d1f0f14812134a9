"""``compile=True``: which functions reach ``torch.compile``, what a tap sees, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from twostroke.engine import EngineConfig, ModelRunner, SamplingParams, build_runner
from twostroke.engine.config import InvalidConfig
from twostroke.engine.models import Decoder, random_model, tiny_config
from twostroke.engine.models.compiled import CompilationFailed, CompiledModel, CompiledPieces
from twostroke.engine.serving_loop import scheduler_for

LIMITS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 40}
PROMPTS = ([1, 2, 3, 4, 5], [9], [7, 8, 7, 8, 7, 8, 9])


class Spy:
    """Stands for ``torch.compile``: notes functions and calls, and compiles nothing."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.calls: list[str] = []

    def __call__(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert dynamic
        name = function.__name__
        self.functions.append(name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return called


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """In the place of ``torch.compile``."""
    spy = Spy()
    monkeypatch.setattr(torch, "compile", spy)
    return spy


@pytest.fixture
def model() -> Decoder:
    """Three layers, as wide as the products that keep a transposed copy."""
    return random_model(tiny_config(num_hidden_layers=3, intermediate_size=640), native=False)


def generate(runner: ModelRunner, num_tokens: int = 6) -> list[list[int]]:
    """The greedy tokens of every prompt."""
    scheduler = scheduler_for(runner)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        scheduler.add_request(str(index), prompt, params)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while scheduler.has_work():
        scheduled = scheduler.schedule()
        output = runner.execute_model(scheduled)
        if output is None:
            output = runner.sample_tokens().get_output()
        for update in scheduler.update_from_output(scheduled, output):
            tokens[int(update.req_id)] += update.new_token_ids
    return tokens


def runner_over(model: Decoder, **options: Any) -> ModelRunner:
    """A runner over ``model``."""
    return build_runner(EngineConfig(**LIMITS, **options), model=model)


def test_one_function_is_compiled_for_all_layers(model: Decoder, spy: Spy) -> None:
    plain, compiled = runner_over(model), runner_over(model, compile=True)
    assert not spy.functions
    assert generate(compiled, 3) == generate(plain, 3)
    assert spy.functions == ["_embed_and_start", "_finish_and_prepare", "_end"]
    steps = spy.calls.count("_end")
    assert steps >= 3
    assert spy.calls.count("_finish_and_prepare") == 2 * steps


def test_without_the_option_nothing_is_compiled(model: Decoder, spy: Spy) -> None:
    generate(runner_over(model))
    assert not spy.functions


def test_a_piece_that_is_tapped_runs_as_it_is(model: Decoder, spy: Spy) -> None:
    runner = runner_over(model, compile=True)
    seen: list[str] = []
    handle = runner.observe("layers.*.mlp", lambda activation: seen.append(activation.name))
    tokens = generate(runner, 2)
    assert not spy.calls
    assert set(seen) == {f"layers.{layer}.mlp" for layer in range(3)}
    handle.close()
    assert generate(runner, 2) == tokens
    assert spy.calls


def test_a_weight_written_in_place_counts(model: Decoder, spy: Spy) -> None:
    runner = runner_over(model, compile=True)
    generate(runner, 2)
    linear = model.weights.linears["layers.1.gate_up"]
    assert linear.transposed is not None
    linear.weight.mul_(-1.5)
    generate(runner, 2)
    assert torch.equal(linear.transposed, linear.weight.t())


def test_a_failure_of_the_compiler_names_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import Unsupported

    def fails(*_: Any) -> None:
        raise Unsupported("no such thing")

    def compiling(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert callable(function)
        assert dynamic
        return fails

    monkeypatch.setattr(torch, "compile", compiling)

    def piece(layer: int, rows: torch.Tensor) -> torch.Tensor:
        return rows * layer

    with pytest.raises(CompilationFailed, match=r"could not compile 'piece' \(Unsupported\); leave compile=False") as e:
        CompiledPieces().of(partial(piece, 2))(torch.ones(1))
    assert isinstance(e.value.__cause__, Unsupported)


def test_no_compiler(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilationFailed, match=r"needs a C\+\+ compiler, and there is none of .*; install g\+\+"):
        CompiledModel(model)


def test_what_excludes_it() -> None:
    spec = random_model(tiny_config(num_hidden_layers=1)).spec
    with pytest.raises(InvalidConfig, match="compile=True and batch_invariant=True exclude each other"):
        EngineConfig(compile=True, batch_invariant=True).resolve(spec)
    with pytest.raises(InvalidConfig, match="compile=True is for a CPU only, and the model lies on cuda:0"):
        EngineConfig(compile=True, num_kv_blocks=40).resolve(spec, device=torch.device("cuda:0"))
    with pytest.raises(InvalidConfig, match="compile must be True or False, got 'yes'"):
        EngineConfig(compile="yes").resolve(spec)  # pyright: ignore[reportArgumentType]


@pytest.mark.e2e
@pytest.mark.skipif(torch.cuda.is_available(), reason="the option is for a CPU")
def test_compiled_tokens_are_the_same(model: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = runner_over(model), runner_over(model, compile=True)
    with caplog.at_level(logging.INFO, logger="twostroke.engine.models.compiled"):
        assert generate(compiled) == generate(plain)
    assert "compiled _finish_and_prepare in" in caplog.text
    with torch.no_grad():
        model.weights.linears["layers.1.gate_up"].weight.mul_(-1.5)
    assert generate(compiled) == generate(plain)
