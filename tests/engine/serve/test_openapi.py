"""The served description of the API: it is complete, and nothing that it allows or forbids ends in a server error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.generation import GenerationMode

NOT_DESCRIBED = ("/openapi.json", "/page", "/engine")
"""The description itself, and what the page at ``/`` is made of."""


@pytest.fixture(scope="module")
def small(start: Callable[..., Any]) -> Iterator[Any]:
    """A server whose requests are short, with everything switched on."""
    with ExitStack() as opened:
        yield start(opened, engine={"max_model_len": 48}, grammar=True, max_n=3, max_prompts=4)


def test_every_route_is_described(small: Any) -> None:
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in small.background.server.config.app.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD" and route.path != "/" and not route.path.startswith(NOT_DESCRIBED)
    }
    with small.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert {(method, path) for path, operations in paths.items() for method in operations} == routes


@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_ends_in_a_server_error(small: Any, mode: GenerationMode, examples: int) -> None:
    statuses: set[int] = set()
    with small.http() as http:
        described = http.get("/openapi.json").json()
        for operation in schemathesis.openapi.from_dict(described).get_all_operations():
            chosen: Any = operation.ok()  # pyright: ignore[reportAttributeAccessIssue]
            has_wrong_input = chosen.method == "post" and chosen.path != "/resume"
            if mode is GenerationMode.POSITIVE or has_wrong_input:
                statuses |= tried(http, chosen, mode, examples)
            assert http.post("/resume").status_code == http.post("/wake_up").status_code == 200
    assert statuses >= ({200, 400} if mode is GenerationMode.POSITIVE else {400})
    assert small.loop.healthy
    assert small.service.calls.num_sequences == 0


def tried(http: httpx.Client, operation: Any, mode: GenerationMode, examples: int) -> set[int]:
    """The statuses with which one operation answers generated requests."""
    statuses: set[int] = set()

    @settings(parent=settings.get_profile("soak"), max_examples=examples, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        answer = case.call(base_url=str(http.base_url))
        assert answer.status_code < 500, (answer.status_code, answer.text, case.as_curl_command())
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
        statuses.add(answer.status_code)

    one()
    return statuses
