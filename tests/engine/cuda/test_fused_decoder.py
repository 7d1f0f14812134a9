"""The fused decoder serves what the plain one serves: every architecture, chunked, preempted, in graphs, observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve
from driver import GREEDY, Driver, Served, Wish, serve_alone
from modes import LIMITS, MODES
from twostroke.engine.config import EngineConfig
from twostroke.engine.cuda.fused_decoder import FusedDecoder, fuses
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models import Decoder
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.observe import Activation
from twostroke.stages.forward_context import ForwardContext
from twostroke.stages.records import BatchExecutionDescriptor, ModelInputs, PreparedInputs

MakeFused = Callable[..., ModelRunner]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2_biases": ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 1}),
    "qwen3_head_norms": ("qwen3", {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "mistral_window": ("mistral", {"sliding_window": 3, "num_attention_heads": 2, "num_key_value_heads": 1}),
}
PROMPTS = ((3, 41, 7, 7, 0, 25), (1,), (63, 5, 40))


def make_model(name: str) -> Decoder:
    architecture, changes = MODELS[name]
    return random_model(tiny_config(architecture, **changes))


def make_plain(model: Decoder) -> ModelRunner:
    return build_runner(EngineConfig(**LIMITS), model=model)


def wishes() -> list[Wish]:
    return [Wish(f"r{index}", prompt, 3) for index, prompt in enumerate(PROMPTS)]


def served_alone(model: Decoder, asked: list[Wish]) -> dict[str, Served]:
    runner = make_plain(model)
    return {wish.req_id: serve_alone(runner, wish) for wish in asked}


def assert_served(got: Mapping[str, Served], wanted: Mapping[str, Served]) -> None:
    assert got.keys() == wanted.keys()
    for req_id, served in got.items():
        served.assert_equals(wanted[req_id], 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture(make_fused_runner: MakeFused, name: str) -> None:
    """Prompts in chunks beside decodes, against each request alone."""
    model, asked = make_model(name), wishes()
    runner = make_fused_runner(model)
    assert_served(Driver(runner, 1).run_random(asked, preempt=0.0), served_alone(model, asked))


def test_a_whole_prompt_then_decodes(make_fused_runner: MakeFused) -> None:
    model, wish = make_model("qwen2_biases"), Wish("r", PROMPTS[0] + PROMPTS[2], 4)
    runner = make_fused_runner(model, block_size=7)
    serve_alone(runner, wish).assert_equals(serve_alone(make_plain(model), wish), 1e-4)


@pytest.mark.parametrize("mode", ["full_and_piecewise", "two_ubatches"])
def test_pieces_are_fit_for_graphs_and_micro_batches(make_fused_runner: MakeFused, mode: str) -> None:
    changes = MODES[mode] | ({"cudagraph_capture_sizes": (1, 2, 4)} if mode == "full_and_piecewise" else {})
    model, asked = make_model("qwen2_biases"), wishes()
    runner = make_fused_runner(model, **changes)
    assert_served(Driver(runner, 2).run_random(asked), served_alone(model, asked))
    modes = {mode.name for mode, _ in runner.parts.dispatch.counts}
    assert modes >= {"FULL", "PIECEWISE"} or mode == "two_ubatches"


def test_weights_that_are_loaded_later_are_used(make_fused_runner: MakeFused) -> None:
    model, other = make_model("llama_tied"), random_model(tiny_config("llama", tie_word_embeddings=True), seed=9)
    runner, wish = make_fused_runner(model), Wish("r", PROMPTS[2], 3)
    runner.update_weights(other.parameters.items())
    serve_alone(runner, wish).assert_equals(serve_alone(make_plain(other), wish), 1e-4)


@pytest.fixture
def plain_forwards(monkeypatch: pytest.MonkeyPatch) -> list[ModelInputs]:
    """The inputs of every forward that the plain decoder computes."""
    seen: list[ModelInputs] = []
    plain = Decoder.forward

    def forward(self: Decoder, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        seen.append(inputs)
        return plain(self, inputs, context)

    monkeypatch.setattr(Decoder, "forward", forward)
    return seen


def test_observed_forwards_are_the_plain_decoders(
    make_fused_runner: MakeFused, plain_forwards: list[ModelInputs]
) -> None:
    """A request that is watched halfway gets what it would get, over the keys that both decoders have written."""
    model = make_model("qwen3_head_norms")
    runner, plain = make_fused_runner(model), make_plain(model)
    assert runner.observable == plain.observable
    wish = Wish("r", PROMPTS[0], 4)
    wanted = serve_alone(plain, wish)
    plain_forwards.clear()
    driver, seen = Driver(runner), list[Activation]()
    driver.add(wish)
    driver.step({"r": 6})
    assert not plain_forwards
    with runner.observe("layers.1.mlp", seen.append):
        driver.step({"r": 1})
        driver.step({"r": 1})
    assert len(seen) == len(plain_forwards) == 2
    driver.step({"r": 1})
    assert len(plain_forwards) == 2
    driver.served("r").assert_equals(wanted, 1e-4)


def test_steered_forwards(make_fused_runner: MakeFused) -> None:
    def shift(activation: Activation) -> torch.Tensor:
        return activation.tensor + 0.5

    model, served = make_model("llama_tied"), list[Served]()
    for runner in (make_fused_runner(model), make_plain(model)):
        with runner.observe("layers.0.residual", shift, edit=True):
            served.append(serve_alone(runner, Wish("r", PROMPTS[2], 3, GREEDY)))
    served[0].assert_equals(served[1], 1e-4)


def test_embeddings_take_the_plain_decoder(make_fused_runner: MakeFused, plain_forwards: list[ModelInputs]) -> None:
    """A stage that gives the model the embeddings of the ids changes no token."""
    model = make_model("llama_tied")
    runner, wish = make_fused_runner(model), Wish("r", PROMPTS[2], 3)
    wanted = serve_alone(runner, wish)
    assert not plain_forwards
    preprocess = runner.stages["preprocess"]

    def embed(inputs: PreparedInputs, execution: BatchExecutionDescriptor) -> ModelInputs:
        given = preprocess(inputs, execution)
        return evolve(given, input_ids=None, inputs_embeds=model.weights.embedding[given.input_ids])

    runner.stages.replace("preprocess", embed)
    serve_alone(runner, wish).assert_equals(wanted, 1e-4)
    assert len(plain_forwards) == 3


def test_only_silu_is_fused() -> None:
    assert fuses(make_model("llama_tied"))
    assert not fuses(random_model(tiny_config(hidden_act="gelu_pytorch_tanh")))


def test_logits_are_those_of_the_plain_head() -> None:
    model = make_model("llama_tied")
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    logits = FusedDecoder(model, pdl=False).compute_logits(states)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, model.compute_logits(states))
