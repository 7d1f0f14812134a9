"""A real server on loopback over a tiny random model that knows bytes, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from attrs import frozen
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from twostroke.engine.chat_template import ChatTemplate
from twostroke.engine.config import EngineConfig
from twostroke.engine.loop_grammar import NoGrammar
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.serve.app import create_app
from twostroke.engine.serve.config import ServeConfig
from twostroke.engine.serve.served_model import ServedModel
from twostroke.engine.serve.server import BackgroundServer
from twostroke.engine.serve.service import Service
from twostroke.engine.serving_loop import ServingLoop
from twostroke.engine.structured import GrammarBook
from twostroke.engine.tokenizer import Tokenizer
from twostroke.stages.forward_context import Model

EOS, VOCAB_SIZE, MAX_MODEL_LEN = 256, 257, 512
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@frozen
class Served:
    """A running server and the ways to it."""

    background: BackgroundServer
    loop: ServingLoop
    service: Service
    url: str

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def openai_async(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})


@pytest.fixture(scope="session")
def letters() -> Tokenizer:
    """One token a byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token_id=EOS)


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    """Two narrow layers over the vocabulary of ``letters``."""
    return random_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN))


@pytest.fixture(scope="session")
def start(letters: Tokenizer, tiny_model: Model) -> Callable[..., Any]:
    """``start(stack, engine={…}, grammar=True, **serve_config)``: a server that ends with the stack."""

    def begin(
        stack: ExitStack,
        *,
        engine: dict[str, Any] | None = None,
        grammar: bool = False,
        template: str = TEMPLATE,
        **settings: Any,
    ) -> Served:
        limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "num_kv_blocks": 512}
        limits |= engine or {}
        runner = build_runner(EngineConfig(model="tiny", device="cpu", **limits), model=tiny_model)
        stack.callback(runner.shutdown)
        provider = GrammarBook(letters, VOCAB_SIZE, (EOS,)) if grammar else NoGrammar()
        loop = stack.enter_context(ServingLoop(runner, tokenizer=letters, grammar=provider))
        config = ServeConfig(port=0, **settings)
        model = ServedModel(
            names=config.served_model_names or ("tiny",),
            tokenizer=letters,
            chat_template=ChatTemplate(template, {"eos_token": "<eos>"}) if template else None,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB_SIZE,
            max_model_len=limits["max_model_len"],
        )
        app = create_app(loop, config, model=model)
        background = stack.enter_context(BackgroundServer(app, config))
        return Served(background, loop, app.state.service, background.url)

    return begin


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes at the end of a test what it started."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(start: Callable[..., Served]) -> Iterator[Served]:
    """One server for a module's tests; afterwards nothing may be left of any request."""
    with ExitStack() as opened:
        server = start(opened)
        yield server
        assert server.service.calls.num_sequences == 0
        assert server.loop.num_live_requests == 0


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    """Plain HTTP to it."""
    with served.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The official client."""
    with served.openai() as official:
        yield official
