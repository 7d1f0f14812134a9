"""The timeline page in a browser: it draws, it can be clicked and typed through, it asks nobody for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, Wish
from modes import LIMITS, PARAMS
from twostroke.engine.config import EngineConfig
from twostroke.engine.model_runner import build_runner
from twostroke.engine.models.random_model import random_model, tiny_config
from twostroke.engine.recording_reader import Recording, read_recording
from twostroke.engine.timeline import timeline_of
from twostroke.engine.timeline_html import timeline_page

pytestmark = pytest.mark.e2e
LAPTOP = {"width": 1366, "height": 768}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A random run of a tiny model through graphs of both kinds."""
    path = tmp_path_factory.mktemp("page") / "run.jsonl"
    changes = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": (1, 2, 4, 8)}
    runner = build_runner(EngineConfig(**{**LIMITS, **changes}), model=random_model(tiny_config()))
    wishes = [
        Wish(name, tuple(range(3, 6 + 2 * i)), 4 + i % 4, params) for i, (name, params) in enumerate(PARAMS.items())
    ]
    with runner.record(path):
        Driver(runner, 2).run_random(wishes, preempt=0.2)
    return read_recording(path)


@pytest.fixture
def open_page(browser: Any, recording: Recording, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page and fails, at the end, if it complained, or asked for anything but itself."""
    path = tmp_path / "run.html"
    path.write_text(timeline_page(timeline_of(recording), "run.jsonl"), encoding="utf-8")
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_(**options: Any) -> Any:
        context = browser.new_context(viewport=LAPTOP, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def heading(page: Any) -> str:
    return page.locator("#detail h2").inner_text()


def pixels(page: Any, canvas: str) -> str:
    """What is drawn, as text that can be compared."""
    return page.evaluate(f"document.getElementById('{canvas}').toDataURL()")


def test_everything_is_drawn(open_page: Callable[..., Any], recording: Recording) -> None:
    page = open_page()
    assert page.locator("h1").inner_text() == "run.jsonl"
    assert str(len(recording.steps)) in page.locator("#figures").inner_text()
    for stage in ("update_states", "forward", "commit"):
        assert stage in page.locator("#stages").inner_text()
    assert "FULL" in page.locator("#modes").inner_text()
    assert page.locator("#requests tbody tr").count() == len(PARAMS)
    for state in ("IDLE", "FORWARDED", "SAMPLED"):
        assert page.locator(".machine").get_by_text(state).count() == 1
    blank = "document.createElement('canvas').toDataURL()"
    assert page.evaluate(blank) != pixels(page, "timeline") != pixels(page, "batches")


def test_nothing_is_wider_than_a_laptop_or_a_phone(open_page: Callable[..., Any]) -> None:
    page = open_page()
    for width in (1366, 900, 420):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_steps_are_chosen_by_keys(open_page: Callable[..., Any], recording: Recording) -> None:
    page = open_page()
    last = len(recording.steps)
    page.locator("#timeline").focus()
    assert heading(page).startswith("Step 1 ")
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", last), ("Home", 1)):
        page.keyboard.press(key)
        assert heading(page).startswith(f"Step {number} ")
    assert "step 1 selected" in page.locator("#timeline").get_attribute("aria-label")


def test_zoom_and_pan_by_keys_wheel_and_buttons(open_page: Callable[..., Any]) -> None:
    page = open_page()
    canvas = page.locator("#timeline")
    canvas.focus()
    whole = pixels(page, "timeline")
    page.keyboard.press("+")
    zoomed = pixels(page, "timeline")
    assert zoomed != whole
    page.keyboard.press("Shift+ArrowRight")
    assert pixels(page, "timeline") != zoomed
    page.keyboard.press("0")
    assert pixels(page, "timeline") == whole
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 90)
    page.mouse.wheel(0, -300)
    page.wait_for_function("whole => document.getElementById('timeline').toDataURL() !== whole", arg=whole)
    before = pixels(page, "timeline")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 120, box["y"] + 90, steps=4)
    page.mouse.up()
    assert pixels(page, "timeline") != before
    page.get_by_role("button", name="Fit").click()
    page.mouse.move(0, 0)
    assert pixels(page, "timeline") == whole
    page.get_by_role("button", name="Next step").click()
    assert heading(page).startswith("Step 2 ")


def test_a_click_chooses_the_step_under_it(open_page: Callable[..., Any], recording: Recording) -> None:
    page = open_page()
    batches = page.locator("#batches")
    batches.click(position={"x": batches.bounding_box()["width"] - 12, "y": 60})
    assert heading(page).startswith(f"Step {len(recording.steps)} ")
    page.locator("#requests button").last.click()
    assert not heading(page).startswith(f"Step {len(recording.steps)} ")
    assert page.locator("#detail tbody tr").count() >= 1


def test_the_tip_says_what_is_under_the_pointer(open_page: Callable[..., Any]) -> None:
    page = open_page()
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + 130, box["y"] + 58)
    assert "step" in page.locator("#tip").inner_text()
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()


def test_dark_is_dark_and_paper_is_white(open_page: Callable[..., Any], tmp_path: Path) -> None:
    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert light.evaluate(background) != dark.evaluate(background)
    assert pixels(light, "timeline") != pixels(dark, "timeline")
    dark.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert dark.evaluate("document.documentElement.className") == "paper"
    dark.evaluate("window.dispatchEvent(new Event('afterprint'))")
    printed = light.pdf(path=tmp_path / "page.pdf", format="A4", landscape=True, print_background=True)
    assert printed.startswith(b"%PDF")
