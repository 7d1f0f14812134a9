"""A framework's client against the real command: langchain-openai, with the packaged model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]
langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where ``twostroke serve`` listens."""
    command = [sys.executable, "-m", "twostroke.engine.cli", "serve", "--port", "0", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TWOSTROKE_API_KEY": "the-key"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        found = None
        for line in process.stderr:
            if found := re.search(r"serving .* on (http://\S+)", line):
                break
        assert found is not None
        yield found[1]
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_langchain_invokes_streams_and_gets_structured_output(url: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=f"{url}/v1", api_key="the-key", model="smollm2", temperature=0, max_tokens=48, max_retries=0
    )
    answer = chat.invoke("What is the capital of France?")
    assert "Paris" in str(answer.content)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in chat.stream("What is the capital of France?")) == answer.content
    schema = {
        "title": "answer",
        "description": "An answer.",
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    structured = chat.with_structured_output(schema, method="json_schema")
    assert structured.invoke("What is the capital of France?") in ({"capital": "Paris"}, {"capital": "Rome"})


def test_langchain_sees_a_wrong_key(url: str) -> None:
    chat = langchain_openai.ChatOpenAI(base_url=f"{url}/v1", api_key="another", model="smollm2", max_retries=0)
    with pytest.raises(Exception, match="API key"):
        chat.invoke("Hello")
