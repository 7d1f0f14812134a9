"""The page's files and the figures behind it, without a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from twostroke.engine.serve import page_routes

FOLDER = Path(page_routes.__file__).parent / "page"


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/", "index.html", "text/html"),
        ("/page/page.css", "page.css", "text/css"),
        ("/page/page.js", "page.js", "text/javascript"),
    ],
)
def test_the_files_are_served_as_they_are(http: httpx.Client, path: str, name: str, kind: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_page_names_nothing_but_its_own_files() -> None:
    text = "".join(path.read_text() for path in sorted(FOLDER.iterdir()))
    assert re.findall(r"https?://[^\s\"'`]+", text) == []
    assert sorted(re.findall(r"(?:href|src)=\"([^\"#]+)\"", text)) == ["data:,", "page/page.css", "page/page.js"]
    assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|document\.write", text), "text could become markup"


def test_only_the_files_of_the_page_are_there(http: httpx.Client) -> None:
    for path in ("/page/", "/page/index.html", "/page/../page_routes.py", "/page/%2e%2e/app.py", "/page/x.js"):
        assert http.get(path).status_code == 404, path
    assert http.post("/").status_code == 405


def test_the_figures_move_with_the_engine(http: httpx.Client) -> None:
    before = http.get("/engine/state").json()
    assert before["is_healthy"] is True
    assert before["fault"] is None
    assert before["model"] == "tiny"
    done = http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True})
    assert done.status_code == 200
    after = http.get("/engine/state").json()
    assert after["generated_tokens"] == before["generated_tokens"] + 7
    assert after["num_steps"] >= before["num_steps"] + 7
    assert after["seconds"] > before["seconds"]
    assert after["state"] in ("IDLE", "SAMPLED")
    assert (after["num_running"], after["num_waiting"]) == (0, 0)
    assert after["stages"]["forward"] > before["stages"].get("forward", 0.0)
    counts = sum(mode["steps"] for mode in after["modes"]) - sum(mode["steps"] for mode in before["modes"])
    assert counts >= 7
    assert 0 <= after["kv_cache_usage"] <= 1
    assert http.get("/engine/state", params={"x": 1}).status_code == 400


def test_running_requests_are_counted(start: Callable[..., Any], stack: ExitStack) -> None:
    server = start(stack)
    with server.http() as http:
        server.loop.pause()
        handles = [server.loop.add([1, 2, 3]) for _ in range(3)]
        paused = http.get("/engine/state").json()
        assert paused["is_paused"] is True
        assert paused["num_waiting"] == 3
        server.loop.resume()
        for handle in handles:
            handle.result(timeout=30)
        assert http.get("/engine/state").json()["is_paused"] is False


def test_an_engine_that_went_down_says_why(start: Callable[..., Any], stack: ExitStack) -> None:
    server = start(stack)
    server.loop.stop()
    with server.http() as http:
        state = http.get("/engine/state").json()
    assert state["is_healthy"] is False
    assert state["fault"] == "the serving loop is STOPPED, the runner is READY"


def test_figures_need_the_key_and_the_page_does_not(start: Callable[..., Any], stack: ExitStack) -> None:
    server = start(stack, api_keys=("secret",))
    with server.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/page/page.js").status_code == 200
        assert http.get("/engine/state").status_code == 401
        assert http.get("/engine/state", headers={"authorization": "Bearer secret"}).status_code == 200
