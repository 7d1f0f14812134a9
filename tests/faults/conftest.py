"""A tiny random model, a model of two KV-cache groups, runners over them, and what each request gets alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from driver import Driver, Served, Wish, serve_alone
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.loading.sources import open_checkpoint
from twostroke.engine.model_runner import ModelRunner, build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.tokenizer import Tokenizer
from twostroke.stages.forward_context import ForwardContext, Model
from twostroke.stages.records import ModelInputs
from twostroke.stages.specs import AttentionLayerSpec, ModelSpec

MakeRunner = Callable[..., ModelRunner]


class TwoGroupModel:
    """Two attention layers whose keys differ in shape, so that each has a block table of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        vocab, hidden, heads, size = 64, 32, 4, 8
        layers = (
            AttentionLayerSpec(num_heads=heads, num_kv_heads=2, head_size=size, scale=0.6),
            AttentionLayerSpec(num_heads=heads, num_kv_heads=1, head_size=size, scale=0.6, sliding_window=5),
        )
        self.spec = ModelSpec(
            architecture="two groups", vocab_size=vocab, hidden_size=hidden, max_position=64, attention_layers=layers
        )
        self.embedding = torch.randn(vocab, hidden, generator=generator)
        self.positions = torch.randn(64, hidden, generator=generator)
        sizes = [(heads + 2 * layer.num_kv_heads) * size for layer in layers]
        self.projections = [torch.randn(hidden, width, generator=generator) / hidden**0.5 for width in sizes]
        self.outputs = [torch.randn(hidden, hidden, generator=generator) / hidden**0.5 for _ in layers]
        self.head = torch.randn(hidden, vocab, generator=generator) * 3 / hidden**0.5

    def _project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        spec = self.spec.attention_layers[layer]
        key = spec.num_kv_heads * spec.head_size
        return (hidden, *(hidden @ self.projections[layer]).split((spec.num_heads * spec.head_size, key, key), dim=1))

    def _mix(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden + 2 * attended @ self.outputs[layer], hidden.shape[-1:])

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> torch.Tensor:
        def first(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._project(0, self.embedding[ids] + self.positions[positions])

        def second(hidden: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._project(1, self._mix(0, hidden, attended))

        def last(hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
            return self._mix(1, hidden, attended)

        hidden, *qkv = context.segment(0, first, inputs.input_ids, inputs.positions)
        hidden, *qkv = context.segment(1, second, hidden, context.attend(0, *(part.contiguous() for part in qkv)))
        return context.segment(2, last, hidden, context.attend(1, *(part.contiguous() for part in qkv)))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head


@pytest.fixture(scope="session")
def model() -> Model:
    """Two layers, float32."""
    return random_model(tiny_config())


@pytest.fixture(scope="session")
def two_groups() -> Model:
    """A model with two KV-cache groups."""
    return TwoGroupModel()


@pytest.fixture(scope="session")
def make_runner(model: Model) -> MakeRunner:
    """A ready runner over the tiny model; keyword arguments change the configuration."""

    def make(model: Model = model, **changes: Any) -> ModelRunner:
        return build_runner(EngineConfig(**{**LIMITS, **changes}), model=model)

    return make


@pytest.fixture
def runner(make_runner: MakeRunner) -> ModelRunner:
    """An eager runner."""
    return make_runner()


@pytest.fixture(scope="session")
def wishes() -> list[Wish]:
    """One request for each kind of sampling, of different lengths."""
    return [
        Wish(name, tuple((5 * i + 3 * j) % 60 for j in range(2 + 3 * i % 10)), 3 + i % 4, params)
        for i, (name, params) in enumerate(PARAMS.items())
    ]


@pytest.fixture(scope="session")
def serve_each(make_runner: MakeRunner) -> Callable[..., dict[str, Served]]:
    """``serve_each(wishes, model=…)``: what each request gets alone, eager and unchunked; each served once."""
    runners: dict[str, ModelRunner] = {}
    served: dict[str, Served] = {}

    def serve_once(name: str, wish: Wish) -> Served:
        key = f"{name} {wish}"
        if key not in served:
            served[key] = serve_alone(runners[name], wish)
        return served[key]

    def serve(wishes: Sequence[Wish], **changes: Any) -> dict[str, Served]:
        name = f"{changes}"  # a model in it goes by its address, and is kept by its runner
        if name not in runners:
            runners[name] = make_runner(**changes)
        return {wish.req_id: serve_once(name, wish) for wish in wishes}

    return serve


@pytest.fixture(scope="session")
def alone(serve_each: Callable[..., dict[str, Served]], wishes: list[Wish]) -> dict[str, Served]:
    """What each of ``wishes`` gets alone."""
    return serve_each(wishes)


@pytest.fixture(scope="session")
def finish_all() -> Callable[[Driver], dict[str, Served]]:
    """``finish_all(driver)``: go on with as many requests as fit in each step, to everyone's end; what each got."""

    def finish(driver: Driver) -> dict[str, Served]:
        def next_counts() -> Mapping[str, int]:
            counts, budget = dict[str, int](), driver.runner.config.max_num_batched_tokens
            for req_id, request in driver.requests.items():
                if len(request.outputs) < request.wish.max_tokens and budget:
                    counts[req_id] = min(request.left, budget)
                    budget -= counts[req_id]
            return counts

        while counts := next_counts():
            driver.step(counts)
        got = {req_id: driver.served(req_id) for req_id in driver.requests}
        driver.finish(*driver.requests)
        driver.step({})
        return got

    return finish


@pytest.fixture(scope="session")
def assert_served() -> Callable[[Mapping[str, Served], Mapping[str, Served]], None]:
    """``assert_served(got, expected)``: the same tokens and log probabilities for everyone in ``got``."""

    def check(got: Mapping[str, Served], expected: Mapping[str, Served]) -> None:
        for req_id, served in got.items():
            served.assert_equals(expected[req_id])

    return check


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    """The tokenizer of the packaged model, without its weights. Tests that use it are marked ``model``."""
    tokenizer = open_checkpoint("smollm2").tokenizer()
    assert tokenizer is not None
    return tokenizer
