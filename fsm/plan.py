"""Checks that stages fit together, and turns them into calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from attrs import frozen

from .errors import WiringError
from .transaction import Transaction
from .wiring import Parameter, Record, Stage, StageFunction

Records = dict[type[Any], Any]
"""The records of a step, each under its class."""


@frozen(eq=False)
class StageCall:
    """A stage that is ready to run: which records to fetch, and what to expect back."""

    name: str
    fn: StageFunction
    positional: tuple[type[Any], ...]
    keywords: tuple[tuple[str, type[Any]], ...]
    gives: Record | None
    kind: type[Any] | None
    """The class of what it gives; None if it gives nothing."""

    def run(self, records: Records) -> object:
        """Call the stage and file what it gives.

        Raises:
            WiringError: it returned something other than what it declares.
        """
        get = records.get
        if self.keywords:
            record = self.fn(*map(get, self.positional), **{name: get(key) for name, key in self.keywords})
        else:
            record = self.fn(*map(get, self.positional))
        kind = self.kind
        if kind is not None and isinstance(record, kind):
            records[kind] = record
        elif record is not None or (self.gives is not None and not self.gives.optional):
            raise WiringError(
                f"stage {self.name!r} declares that it gives {self.gives}, and returned {type(record).__name__} "
                f"({type(record).__module__}.{type(record).__qualname__})"
            )
        return record


@frozen(eq=False)
class Plan:
    """The calls of a pipeline. ``required`` must be there before the first; ``at_end`` is there after the last."""

    calls: tuple[StageCall, ...]
    required: frozenset[type[Any]]
    at_end: tuple[Record, ...]


def make_plan(stages: Mapping[str, Stage], given: Sequence[Record]) -> Plan:
    """Check that every stage gets what it needs from those before it (or from ``given``), and plan the calls.

    Raises:
        WiringError: a record is missing or may be missing, or would have two writers.
    """
    return _Planner(stages, given).plan()


class _Planner:
    """Walks the stages in order and keeps what is there so far, by class: the record, and who wrote it."""

    def __init__(self, stages: Mapping[str, Stage], given: Sequence[Record]) -> None:
        self.stages = stages
        self.there = {record.type: record for record in (*given, Record(Transaction))}
        self.writers: dict[type[Any], str] = {}
        self.required: set[type[Any]] = set()

    def plan(self) -> Plan:
        calls: list[StageCall] = []
        for name, stage in self.stages.items():
            calls.append(self._call(name, stage))
            if stage.gives is not None:
                self._write(name, stage, stage.gives)
        at_end = tuple(record for record in self.there.values() if record.type is not Transaction)
        return Plan(tuple(calls), frozenset(self.required), at_end)

    def _call(self, name: str, stage: Stage) -> StageCall:
        positional: list[type[Any]] = []
        keywords: list[tuple[str, type[Any]]] = []
        left_out = False
        for parameter in stage.takes:
            wanted = parameter.record
            if parameter.has_default and wanted.type not in self.there:
                left_out = True
                continue
            if not wanted.optional:
                self._require(name, parameter)
            if parameter.keyword_only or left_out:
                keywords.append((parameter.name, wanted.type))
            else:
                positional.append(wanted.type)
        kind = None if stage.gives is None else stage.gives.type
        return StageCall(name, stage.fn, tuple(positional), tuple(keywords), stage.gives, kind)

    def _require(self, name: str, parameter: Parameter) -> None:
        wanted = parameter.record.type
        found = self.there.get(wanted)
        if found is None:
            self._missing(name, wanted)
        writer = self.writers.get(wanted)
        if found.optional:
            source = f"which stage {writer!r} returns" if writer else "which is given"
            raise WiringError(
                f"stage {name!r} needs {wanted.__name__}, {source} only as {found}; "
                f"annotate the parameter {parameter.name!r} with {found} and handle None; order: {self._order()}"
            )
        if writer is None:
            self.required.add(wanted)

    def _write(self, name: str, stage: Stage, gives: Record) -> None:
        before = self.there.get(gives.type)
        if before is not None and all(parameter.record.type is not gives.type for parameter in stage.takes):
            writer = self.writers.get(gives.type)
            source = f"stage {writer!r} returns" if writer else "is given before the first stage"
            raise WiringError(
                f"stage {name!r} returns {gives.type.__name__}, which {source} already, and a record has one writer; "
                f"let {name!r} take the {gives.type.__name__} that it replaces, or remove one of the two; "
                f"order: {self._order()}"
            )
        # A rebinding stage that returns None leaves the record as it was.
        certain = not gives.optional or (before is not None and not before.optional)
        self.there[gives.type] = Record(gives.type, optional=not certain)
        self.writers[gives.type] = name

    def _missing(self, name: str, wanted: type[Any]) -> NoReturn:
        names = list(self.stages)
        later = [other for other in names[names.index(name) :] if self._gives(other) is wanted and other != name]
        twin = next((known for known in self.there if known.__name__ == wanted.__name__), None)
        if later:
            cure = f"stage {later[0]!r} returns it: move it before {name!r}"
        elif twin is not None:
            cure = (
                f"there is another class of that name, {twin.__module__}.{twin.__qualname__} beside "
                f"{wanted.__module__}.{wanted.__qualname__}: was a module or a notebook cell run twice?"
            )
        else:
            cure = (
                f"insert a stage that returns it before {name!r}, name it in given=(...), "
                f"or take {wanted.__name__} | None"
            )
        raise WiringError(
            f"stage {name!r} needs {wanted.__name__}, which no earlier stage returns; order: {self._order()}; {cure}"
        )

    def _gives(self, name: str) -> type[Any] | None:
        gives = self.stages[name].gives
        return None if gives is None else gives.type

    def _order(self) -> str:
        return " ▸ ".join(self.stages)
