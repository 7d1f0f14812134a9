"""Reading recordings: ours, and traces of vLLM's scheduler. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ..fsm.errors import TwoStrokeError
from ..stages.io import GrammarOutput, SchedulerOutput
from .recording_format import VERSION, Fields, grammar_output, scheduler_output

Logprobs = tuple[Sequence[Sequence[int]], Sequence[Sequence[float | None]], Sequence[int]]
"""Token ids and log probabilities, one row a position, and the rank of each row's first token."""


class RecordingError(TwoStrokeError, ValueError):
    """A file that is no recording, or of a version that this program does not know; the message names the line."""


@frozen(kw_only=True)
class RecordedOutput:
    """What a step gave. ``tokens[req_id]`` is empty where nothing was sampled; ``plan`` is how the batch ran."""

    tokens: Mapping[str, Sequence[int]]
    logprobs: Mapping[str, Logprobs] = field(factory=dict)
    prompt_logprobs: Mapping[str, Logprobs] = field(factory=dict)
    errors: Mapping[str, str] = field(factory=dict)
    plan: Mapping[str, Any] = field(factory=dict)
    is_redacted: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> RecordedOutput:
        """From an ``output`` line, of either kind of recording."""
        sampled = line["sampled_token_ids"]
        is_redacted = any(isinstance(ids, dict) for ids in sampled)
        shown = [[-1] * ids["redacted"] if isinstance(ids, dict) else ids for ids in sampled]
        tokens = dict(zip(line["req_ids"], shown, strict=True))
        logprobs = line.get("logprobs") or {}
        if isinstance(logprobs, list):  # vLLM's: one row a request, those that sampled nothing included
            rows = zip(line["req_ids"], *logprobs, strict=True)
            logprobs = {req_id: ([ids], [values], [rank]) for req_id, ids, values, rank in rows if tokens[req_id]}
        return cls(
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=line.get("prompt_logprobs") or {},
            errors=line.get("errors", {}),
            plan=line.get("plan", {}),
            is_redacted=is_redacted,
        )


@frozen(kw_only=True)
class RecordedStage:
    """A stage that ran: times in microseconds, since the recording began."""

    name: str
    start_us: float
    duration_us: float


@frozen(kw_only=True, eq=False)
class RecordedStep:
    """One call of ``execute_model`` and what came of it. ``failure`` is the line of the last stroke that raised."""

    number: int
    scheduled: SchedulerOutput
    grammar: GrammarOutput | None = None
    output: RecordedOutput | None = None
    stages: tuple[RecordedStage, ...] = ()
    failure: Mapping[str, Any] | None = None
    is_rolled_back: bool = False
    left_out: tuple[str, ...] = ()
    tensors: Path | None = None

    @property
    def was_undone(self) -> bool:
        """Whether it left nothing behind: its first stroke failed, or it was taken back."""
        return self.is_rolled_back or (self.failure is not None and self.failure["stroke"] == "execute")

    @property
    def ends(self) -> dict[str, int]:
        """Of each request, how many of its tokens are computed after this step: where its next token goes."""
        starts = {data.req_id: data.num_computed_tokens for data in self.scheduled.scheduled_new_reqs}
        cached = self.scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {key: starts.get(key, 0) + count for key, count in self.scheduled.num_scheduled_tokens.items()}


@frozen(kw_only=True, eq=False)
class Recording:
    """A whole recording. ``header`` is its first line, ``state`` the requests that were live before its first step.

    ``settles`` are the numbers of the steps after which the runner waited for its outputs; ``torn`` says which line at
    the end could not be read, or is empty.
    """

    path: Path | None
    header: Mapping[str, Any]
    steps: tuple[RecordedStep, ...]
    state: Sequence[Mapping[str, Any]] = ()
    settles: tuple[int, ...] = ()
    torn: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """The recorded runner's configuration, by the names of ``EngineConfig``."""
        return self.header["config"]

    @property
    def is_redacted(self) -> bool:
        """Whether token ids were left out."""
        return bool(self.header.get("redacted"))


def read_recording(path: str | Path) -> Recording:
    """Read a recording, up to a last line that was cut off by a crash.

    Raises:
        RecordingError: it is none, has a line in its middle that can't be read, or is of a later version.
        OSError: the file can't be read.
    """
    path = Path(path)
    lines, torn = _lines(path)
    if not lines or lines[0].get("kind") not in ("recording", "setup"):
        raise RecordingError(f"{path} does not begin with a recording's header")
    header = lines[0]
    if header["kind"] == "setup":
        return Recording(path=path, header=_header_of_vllm(header, lines), steps=_vllm_steps(header, lines), torn=torn)
    if header.get("version") != VERSION:
        raise RecordingError(f"{path} is of version {header.get('version')}, this program reads version {VERSION}")
    try:
        return Recording(
            path=path,
            header=header,
            steps=tuple(_steps(lines[1:], path)),
            state=next((line["requests"] for line in lines if line["kind"] == "state"), ()),
            settles=tuple(line["step"] for line in lines if line["kind"] == "settle"),
            torn=torn,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} holds a line that is not as it should be: {error!r}") from error


def _lines(path: Path) -> tuple[list[Fields], str]:
    lines: list[Fields] = []
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(texts):
                return lines, f"line {number} is cut off"
            raise RecordingError(f"{path}, line {number}: {error}") from error
        if not isinstance(line, dict) or "kind" not in line:
            raise RecordingError(f"{path}, line {number} is not an object with a kind")
        lines.append(line)
    return lines, ""


def _steps(lines: Iterable[Fields], path: Path) -> Iterator[RecordedStep]:
    by_step: dict[int, dict[str, Fields]] = {}
    for line in lines:
        if "step" in line and line["kind"] != "settle":
            by_step.setdefault(line["step"], {})[line["kind"]] = line
    for number, found in by_step.items():
        step = found["step"]
        new_lines = step.get("scheduled_new_reqs", ())
        tensors = tensors_path(path, number)
        yield RecordedStep(
            number=number,
            scheduled=scheduler_output(step),
            grammar=grammar_output(found["grammar"]) if "grammar" in found else None,
            output=RecordedOutput.of(found["output"]) if "output" in found else None,
            stages=tuple(
                RecordedStage(name=name, start_us=start / 1e3, duration_us=duration / 1e3)
                for kind in ("times", "output")
                for name, start, duration in found.get(kind, {}).get("stages", ())
            ),
            failure=found.get("failed"),
            is_rolled_back="rollback" in found,
            left_out=tuple(name for line in (step, *new_lines) for name in line.get("left_out", ())),
            tensors=tensors if tensors.exists() else None,
        )


def tensors_path(recording: Path, step: int) -> Path:
    """Where the tensors of a step lie, if they were recorded."""
    return recording.with_suffix(".tensors") / f"{step:06d}.safetensors"


# ---- vLLM


def _header_of_vllm(setup: Fields, lines: Sequence[Fields]) -> Fields:
    """A header like ours. The pool is as large as the trace uses it, and as a request of full length needs."""
    steps = [line for line in lines if line["kind"] == "step"]
    used = max((block for step in steps for block in _blocks(step)), default=0) + 1
    config = {name: setup[name] for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    config["num_kv_blocks"] = max(used, -(-setup["max_model_len"] // setup["block_size"]) + 1)
    return {"kind": "recording", "version": VERSION, "source": "vllm", "model": setup["model"], "config": config}


def _vllm_steps(setup: Fields, lines: Sequence[Fields]) -> tuple[RecordedStep, ...]:
    steps: list[RecordedStep] = []
    for line in lines:
        if line["kind"] == "step":
            for data in line["scheduled_new_reqs"]:
                data["sampling_params"] = setup["sampling"] | {"max_tokens": data["max_tokens"], "ignore_eos": True}
            output = RecordedOutput.of(line["output"])
            steps.append(RecordedStep(number=len(steps) + 1, scheduled=scheduler_output(line), output=output))
    return tuple(steps)


def _blocks(step: Fields) -> Iterator[int]:
    for data in step["scheduled_new_reqs"]:
        yield from (block for group in data["block_ids"] for block in group)
    for groups in step["scheduled_cached_reqs"]["new_block_ids"]:
        yield from (block for group in groups or () for block in group)
