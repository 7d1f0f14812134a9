"""Raises one error inside the engine's own code, at a place of the test's choice, without changing that code."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import transitions.core
import twostroke.engine
import twostroke.fsm
import twostroke.stages

FOLDERS = tuple(
    str(Path(package.__file__ or "").parent) for package in (twostroke.fsm, twostroke.stages, twostroke.engine)
)
LOOP = dis.opmap["JUMP_BACKWARD"]
AFTER = {dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap}
HANDLER = dis.opmap["PUSH_EXC_INFO"]  # follows a call that raised instead of returning


class When(StrEnum):
    """Where in a stage an error is raised."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


class Fault:
    """Raises ``error`` once while it is ``armed``.

    ``stage`` is the callable whose work is spoilt: BEFORE it does anything, AFTER all of it, or DURING it, at the
    ``place``-th point in code of the engine where the interpreter looks for signals (where a function starts, a loop
    goes round, a call has returned). Without a stage, places count from the start, in all code of the engine.
    """

    def __init__(self, error: BaseException, stage: Any = None, when: When = When.DURING, place: int = 1) -> None:
        self.error = error
        self.when = when
        self.place = place
        self.raised = False
        self.num_places = 0
        self._window: CodeType | None = None if stage is None else code_of(stage)
        self._open = 0
        self._code: dict[CodeType, bytes] = {}
        self._last: dict[FrameType, int] = {}

    @contextmanager
    def armed(self) -> Iterator[Fault]:
        """Raise in what is called inside the ``with`` block."""
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(previous)
            self._last.clear()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self.raised or not (code.co_filename.startswith(FOLDERS) or code.co_filename == transitions.core.__file__):
            return None
        if code.co_flags & CO_GENERATOR:
            return None  # it may be entered to be closed, where nobody sees what it raises
        if code is self._window:
            self._open += 1
            if self.when is When.BEFORE:
                self._raise()
        frame.f_trace_opcodes, frame.f_trace_lines = self.when is When.DURING, False
        self._arrive()
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            opcode = self._opcode(frame)
            last = self._last.get(frame, -1)
            self._last[frame] = opcode
            if opcode == LOOP or (last in AFTER and opcode != HANDLER):
                self._arrive()
        elif event == "return" and frame.f_code is self._window:
            self._open -= 1
            if self.when is When.AFTER and not self.raised:
                self._raise()
        return self._step

    def _opcode(self, frame: FrameType) -> int:
        code = self._code.get(frame.f_code)
        if code is None:
            code = self._code[frame.f_code] = frame.f_code.co_code
        return code[frame.f_lasti]

    def _arrive(self) -> None:
        if self.when is When.DURING and not self.raised and (self._window is None or self._open):
            self.num_places += 1
            if self.num_places == self.place:
                self._raise()

    def _raise(self) -> None:
        self.raised = True
        raise self.error


def code_of(stage: Any) -> CodeType:
    """The code that runs when a stage is called: a function's, a method's, that of an object's ``__call__``, itself."""
    if isinstance(stage, CodeType):
        return stage
    function = getattr(stage, "__func__", stage)
    return function.__code__ if hasattr(function, "__code__") else type(stage).__call__.__code__
