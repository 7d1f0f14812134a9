"""Many clients of a server at once, of every kind there is, and a count of what each got that it should not have."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

KINDS: Mapping[str, int] = {"stream": 6, "whole": 2, "slow": 2, "leave": 3, "pair": 1, "bad": 2, "garbage": 1}
"""Kinds of requests and how often each is made."""

BAD_BODIES: Sequence[bytes] = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": 1}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "nonsense": true}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": [[]]}',
    b"\xff\xfe\x00",
)


@frozen
class Wanted:
    """A prompt and what the model says to it."""

    prompt: str
    text: str
    num_tokens: int


@frozen
class Load:
    """How much of it: so many clients, each until ``seconds`` have passed or it made ``requests`` requests."""

    port: int
    wanted: Sequence[Wanted]
    num_clients: int
    requests: int = 10**9
    seconds: float = 1e9
    seed: int = 0


@define
class Report:
    """What happened. ``lost`` and ``doubled`` count tokens or characters; both must be 0."""

    requests: Counter[str] = field(factory=Counter)
    errors: Counter[str] = field(factory=Counter)
    lost: int = 0
    doubled: int = 0
    memory_growth_bytes: int = 0
    seconds: float = 0.0

    def compare(self, want: Wanted, text: str, *, is_whole: bool) -> None:
        """A text that came for a prompt; of one who left, only the beginning."""
        common = 0
        for mine, theirs in zip(text, want.text, strict=False):
            if mine != theirs:
                break
            common += 1
        self.doubled += len(text) - common
        if is_whole:
            self.lost += len(want.text) - common

    def __str__(self) -> str:
        rate = sum(self.requests.values()) / max(self.seconds, 1e-9)
        return (
            f"{sum(self.requests.values())} requests in {self.seconds:.1f} s ({rate:.0f}/s): {dict(self.requests)}; "
            f"errors {dict(self.errors)}; lost {self.lost}, doubled {self.doubled}; "
            f"memory grew by {self.memory_growth_bytes / 2**20:.1f} MiB"
        )


def resident_bytes() -> int:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def run_load(load: Load) -> Report:
    """All clients, to their end."""
    report = Report()
    began, memory = time.monotonic(), resident_bytes()
    clients = (_Client(load, report, random.Random(f"{load.seed} {index}")) for index in range(load.num_clients))
    await asyncio.gather(*(client.run(began + load.seconds) for client in clients))
    report.seconds = time.monotonic() - began
    report.memory_growth_bytes = resident_bytes() - memory
    return report


class _Client:
    """One client: one request after another, each of a kind that it draws."""

    def __init__(self, load: Load, report: Report, chooser: random.Random) -> None:
        self._load = load
        self._report = report
        self._chooser = chooser

    async def run(self, end: float) -> None:
        for _ in range(self._load.requests):
            if time.monotonic() >= end:
                return
            kind = self._chooser.choices(list(KINDS), list(KINDS.values()))[0]
            act: Callable[[], Awaitable[None]] = getattr(self, f"_{kind}")
            self._report.requests[kind] += 1
            await asyncio.wait_for(act(), 120)

    async def _stream(self, pause: float = 0.0) -> None:
        want = self._chooser.choice(self._load.wanted)
        status, lines = await self._ask(_body(want, stream=True, stream_options={"include_usage": True}), pause)
        if self._is_refused(status):
            return
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        self._report.compare(want, "".join(_text(event) for event in events), is_whole=True)
        self._report.lost += lines[-1] != b"data: [DONE]"
        counted = events[-1]["usage"]["completion_tokens"]
        self._report.lost += max(want.num_tokens - counted, 0)
        self._report.doubled += max(counted - want.num_tokens, 0)

    async def _slow(self) -> None:
        await self._stream(pause=0.01)

    async def _whole(self) -> None:
        want = self._chooser.choice(self._load.wanted)
        status, lines = await self._ask(_body(want))
        if not self._is_refused(status):
            self._report.compare(want, _text(json.loads(lines[-1])), is_whole=True)

    async def _pair(self) -> None:
        wants = self._chooser.sample(self._load.wanted, 2)
        body = _body(wants[0], stream=True) | {"prompt": [want.prompt for want in wants]}
        status, lines = await self._ask(body)
        if self._is_refused(status):
            return
        texts = ["", ""]
        for line in lines:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                texts[choice["index"]] += choice["text"]
        for want, text in zip(wants, texts, strict=True):
            self._report.compare(want, text, is_whole=True)

    async def _leave(self) -> None:
        """Reads a little, or nothing, and goes."""
        want = self._chooser.choice(self._load.wanted)
        reader, writer = await self._connect(_encoded(_body(want, stream=self._chooser.random() < 0.8)))
        lines = [(await reader.readline()).rstrip() for _ in range(self._chooser.randrange(30))]
        if self._chooser.random() < 0.5:
            writer.transport.abort()
        writer.close()
        text = "".join(_text(json.loads(line[6:])) for line in lines if line.startswith(b"data: {"))
        self._report.compare(want, text, is_whole=False)

    async def _bad(self) -> None:
        status, lines = await self._ask(self._chooser.choice(BAD_BODIES))
        self._report.errors[f"unexpected {status}"] += status not in (400, 404)
        self._report.errors["no reason"] += not json.loads(lines[-1])["error"]["message"]

    async def _garbage(self) -> None:
        """Not even HTTP, or a request that ends in its middle."""
        data = self._chooser.choice((b"\x16\x03\x01\x02\x00\x01\x00", b"POST /v1/comp", _head(100) + b"{"))
        _, writer = await self._connect(data)
        await asyncio.sleep(0.01)
        writer.close()

    async def _ask(self, body: Mapping[str, Any] | bytes, pause: float = 0.0) -> tuple[int, list[bytes]]:
        """Status and lines of the answer's body."""
        data = body if isinstance(body, bytes) else _encoded(body)
        reader, writer = await self._connect(_head(len(data)) + data if isinstance(body, bytes) else data)
        lines: list[bytes] = []
        while line := await reader.readline():
            if line.strip():
                lines.append(line.rstrip())
            if pause:
                await asyncio.sleep(pause)
        writer.close()
        return int(lines[0].split()[1]), [line for line in lines[1:] if line != b"0"]

    def _is_refused(self, status: int) -> bool:
        if status == 429:
            self._report.requests["refused with 429"] += 1
        elif status != 200:
            self._report.errors[f"status {status}"] += 1
        return status != 200

    async def _connect(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._load.port, limit=2**16)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(data)
        return reader, writer


def _body(want: Wanted, **fields: Any) -> dict[str, Any]:
    return {"prompt": want.prompt, "max_tokens": want.num_tokens, "temperature": 0, "ignore_eos": True, **fields}


def _encoded(body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return _head(len(data)) + data


def _head(length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {length}", "", "")).encode()


def _text(answer: Mapping[str, Any]) -> str:
    return "".join(choice["text"] for choice in answer["choices"])
