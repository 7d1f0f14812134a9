"""The server's page in a browser: type, stream, stop, see the numbers move; by keys, in the dark, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from attrs import frozen
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from twostroke.engine.chat_template import ChatTemplate
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.serving_loop import ServingLoop
from twostroke.engine.structured import GrammarBook
from twostroke.engine.tokenizer import Tokenizer

pytest.importorskip("starlette", reason="NOT TESTED: pip install 'twostroke[serve]'")
pytestmark = pytest.mark.e2e
EOS, VOCAB_SIZE = 256, 257
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
LAPTOP = {"width": 1366, "height": 768}


@frozen
class Site:
    """A running server."""

    url: str
    loop: ServingLoop


def letters() -> Tokenizer:
    """One token a byte, and an end of sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, eos_token_id=EOS)


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Starts a server over a tiny random model that takes ``step_s`` for a step, so that there is something to see."""
    from twostroke.engine.serve.app import create_app
    from twostroke.engine.serve.config import ServeConfig
    from twostroke.engine.serve.served_model import ServedModel
    from twostroke.engine.serve.server import BackgroundServer

    with ExitStack() as stack:

        def start(*, step_s: float = 0.01, template: str = TEMPLATE, **settings: Any) -> Site:
            tokenizer = letters()
            model = random_model(tiny_config(vocab_size=VOCAB_SIZE, max_position_embeddings=2048))
            limits = {"max_model_len": 2048, "num_kv_blocks": 512, "cudagraph_mode": "FULL_AND_PIECEWISE"}
            runner = build_runner(EngineConfig(model="tiny", device="cpu", max_num_seqs=4, **limits), model=model)
            stack.callback(runner.shutdown)
            runner.stages.wrap("sample", lambda stage: lambda *args: (time.sleep(step_s), stage(*args))[1])
            book = GrammarBook(tokenizer, VOCAB_SIZE, (EOS,))
            loop = stack.enter_context(ServingLoop(runner, tokenizer=tokenizer, grammar=book))
            config = ServeConfig(port=0, **settings)
            served = ServedModel(
                names=("tiny",),
                tokenizer=tokenizer,
                chat_template=ChatTemplate(template, {}) if template else None,
                eos_token_ids=(EOS,),
                vocab_size=VOCAB_SIZE,
                max_model_len=2048,
            )
            app = create_app(loop, config, model=served)
            return Site(stack.enter_context(BackgroundServer(app, config)).url, loop)

        yield start


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a site and fails, at the end, if the page complained, or asked anybody but its server for anything.

    ``refusals`` is how many answers of its server with an error status are part of the test.
    """
    complaints: list[str] = []
    contexts: list[Any] = []
    expected = [0]

    def open_(site: Site, *, refusals: int = 0, **options: Any) -> Any:
        expected[0] += refusals
        context = browser.new_context(viewport=LAPTOP, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(site.url + "/") or complaints.append(request.url))
        page.goto(f"{site.url}/")
        return page

    yield open_
    for context in contexts:
        context.close()
    refused = [text for text in complaints if text.startswith("Failed to load resource: the server responded")]
    assert [text for text in complaints if text not in refused] == []
    assert (len(refused) > 0) == (expected[0] > 0)


def choose(page: Any, kind: str, text: str = "") -> None:
    """Set the format of the answer."""
    if not page.locator("#format").is_visible():
        page.get_by_text("System message and format").click()
    page.locator("#format").select_option(kind)
    if text:
        page.locator("#format-text").fill(text)


def say(page: Any, text: str) -> Any:
    """Type and send a message; gives the answer's place."""
    count = page.locator(".message.assistant").count()
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    answer = page.locator(".message.assistant").nth(count)
    answer.wait_for()
    return answer


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


def finish(page: Any, answer: Any) -> str:
    """Wait for an answer's end; gives its text."""
    wait_until(lambda: answer.get_attribute("aria-busy") is None, "the answer has ended")
    return answer.locator(".text").text_content()


def figure(page: Any, name: str) -> float:
    text = page.locator(f"#{name}").inner_text().replace(",", "").removesuffix(" %")
    return float(text) if text != "–" else 0.0


def test_type_stream_and_see_the_numbers_move(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    site = serve()
    page = open_page(site)
    choose(page, "guided_regex", "[a-z]{150}")
    answer = say(page, "Hello")
    assert page.locator(".message.user .text").inner_text() == "Hello"
    lengths = set[int]()
    while answer.get_attribute("aria-busy"):
        lengths.add(len(answer.locator(".text").text_content()))
        if page.locator("#running").inner_text() == "1":
            lengths.add(-1)
    text = finish(page, answer)
    assert len(text) == 150
    assert text.isalpha()
    assert len(lengths & set(range(1, 150))) >= 3, "it did not come in pieces"
    assert -1 in lengths, "it was never seen running"
    note = answer.locator(".note").inner_text()
    assert note.startswith("151 tokens · ")
    assert "tokens/s" in note
    assert "ended by itself" in note
    wait_until(lambda: page.locator("#running").inner_text() == "0", "nothing runs")
    assert figure(page, "steps") >= 151
    assert "forward" in page.locator("#stages").inner_text()
    assert "FULL" in page.locator("#modes").inner_text()
    assert page.locator("#states [aria-current]").count() == 1
    assert page.locator("#health").inner_text() == "ready"
    assert page.locator("#model").inner_text() == page.title().split(" ")[0] == "tiny"
    assert "," in page.locator("#spark polyline").get_attribute("points")
    again = say(page, "Hello again")
    assert len(finish(page, again)) == 150
    wait_until(lambda: figure(page, "speed") > 0, "the speed is seen")


@pytest.mark.parametrize("how", ["key", "button"])
def test_stop(serve: Callable[..., Site], open_page: Callable[..., Any], how: str) -> None:
    site = serve()
    page = open_page(site)
    choose(page, "guided_regex", "[a-z]{1000}")
    answer = say(page, "Go on for ever")
    wait_until(lambda: len(answer.locator(".text").text_content()) > 5, "some text is there")
    assert site.loop.scheduler.stats().num_running == 1
    wait_until(lambda: page.locator("#kv").get_attribute("aria-valuenow") not in (None, "0.0"), "KV blocks are in use")
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    text = finish(page, answer)
    wait_until(lambda: site.loop.num_live_requests == 0, "the request is gone")
    assert 5 < len(text) < 1000
    assert "stopped by you" in answer.locator(".note").inner_text()
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.locator("#send").is_visible()
    choose(page, "guided_choice", "yes\nno")
    assert finish(page, say(page, "Well?")) in ("yes", "no")
    answer.locator(".text").filter(has_text=text).wait_for()


def test_the_whole_conversation_is_sent(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(step_s=0.0))
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    choose(page, "guided_choice", "one\ntwo")
    page.locator("#system").fill("Be short")
    page.locator("#temperature").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.locator("#seed").fill("5")
    first = finish(page, say(page, "first"))
    second = finish(page, say(page, "second"))
    said = [("system", "Be short"), ("user", "first"), ("assistant", first), ("user", "second")]
    assert [(message["role"], message["content"]) for message in sent[-1]["messages"]] == said
    assert sent[-1]["temperature"] == 0.9
    assert page.locator(".slider output").first.inner_text() == "0.9"
    assert sent[-1]["seed"] == 5
    page.get_by_role("button", name="Again").click()
    wait_until(lambda: len(sent) == 3, "it was asked again")
    assert sent[2] == sent[1]
    assert finish(page, page.locator(".message.assistant").nth(1)) == second, "the same seed gives the same text"
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    finish(page, say(page, "third"))
    assert [message["role"] for message in sent[-1]["messages"]] == ["system", "user"]
    page.reload()
    assert page.locator("#temperature").input_value() == "0.9", "sliders are remembered"


def test_everything_can_be_done_by_keys(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(step_s=0.0))
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    assert page.locator(".message.user .text").text_content() == "two\nlines"
    finish(page, page.locator(".message.assistant"))
    reached = set[str]()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )
    assert {"skip", "new", "theme", "log", "again", "prompt", "send", "temperature", "max_tokens", "seed"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button')].filter(each =>"
        " !each.labels?.length && !each.getAttribute('aria-label') && !each.textContent).map(each => each.id)"
    )
    assert unnamed == []


def test_what_the_server_refuses_is_shown(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(step_s=0.0), refusals=2)
    choose(page, "guided_regex", "[a-z")
    answer = say(page, "Hello")
    wait_until(lambda: "Unclosed" in answer.locator(".note").inner_text(), "the reason is shown")
    assert answer.locator("[role=alert]").count() == 1
    choose(page, "json_schema", "{")
    wait_until(lambda: "no JSON" in say(page, "Hello").locator(".note").inner_text(), "the schema is checked")
    choose(page, "json_schema", '{"type": "boolean"}')
    assert finish(page, say(page, "Hello")) in ("true", "false")


def test_a_model_without_a_template_completes(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(step_s=0.0, template=""), refusals=1)
    choose(page, "guided_choice", "abc")
    assert finish(page, say(page, "Hello")) == "abc"
    assert page.locator(".message.assistant").count() == 1


def test_a_server_with_a_key_asks_for_it(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    page = open_page(serve(step_s=0.0, api_keys=("secret",)), refusals=1)
    page.locator("#key").fill("secret")
    page.locator("#key").press("Enter")
    wait_until(lambda: page.locator("#health").inner_text() == "ready", "the engine is seen")
    choose(page, "guided_choice", "abc")
    assert finish(page, say(page, "Hello")) == "abc"
    assert page.locator("#key-form").is_hidden()


def test_an_engine_that_stops_is_seen(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    site = serve(step_s=0.0)
    page = open_page(site)
    wait_until(lambda: page.locator("#health").inner_text() == "ready", "the engine is seen")
    site.loop.stop()
    wait_until(
        lambda: page.locator("#health").inner_text().startswith("down: the serving loop is STOPPED"), "it is down"
    )


def test_colours_and_widths(serve: Callable[..., Site], open_page: Callable[..., Any]) -> None:
    site = serve(step_s=0.0)
    light, dark = open_page(site, color_scheme="light"), open_page(site, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    colours = light.evaluate(background), dark.evaluate(background)
    assert colours[0] != colours[1]
    seen = [colours[0]]
    for _ in range(3):
        light.locator("#theme").click()
        seen.append(light.evaluate(background))
    assert seen == [colours[0], colours[0], colours[1], colours[0]], "auto, light, dark, auto"
    finish(light, say(light, "x" * 300))
    for width in (1366, 900, 400):
        light.set_viewport_size({"width": width, "height": 800})
        assert light.evaluate("document.documentElement.scrollWidth") <= width
