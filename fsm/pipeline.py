"""A pipeline: stages in order, wired by their annotations, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter, perf_counter_ns
from typing import Any

from .errors import InputRefused, StageFailed, WiringError
from .observers import Observers, ProfilerProbe, StageObserver
from .plan import Records, StageCall, make_plan
from .transaction import Transaction
from .wiring import Record, RecordType, Stage, StageFunction, default_name, read_stage, record_of, rewire


class Pipeline:
    """Named stages. Immutable: every edit returns a new, checked pipeline.

    A stage takes records and returns one; the classes in its annotations say which. ``X | None`` binds None when
    nothing gave X; a default stays where nothing gives the record; any stage may take the :class:`Transaction`. A stage
    that takes and returns one class rebinds it for the stages after it. ``given`` are the records that :meth:`run` is
    handed, ``X | None`` those that it may be handed.
    """

    __slots__ = ("_given", "_names", "_plan", "_profiler", "_stages")

    def __init__(self, stages: Iterable[tuple[str, StageFunction]], given: Iterable[RecordType] = ()) -> None:
        """Read, check and plan.

        Raises:
            WiringError: two stages of one name, annotations that can't be read, a record that is missing or that would
                have two writers. The message names the stage, the record, the order and the cure.
        """
        wired: dict[str, Stage] = {}
        for named in stages:
            name, fn = _checked_pair(named)
            if name in wired:
                raise WiringError(
                    f"there are two stages called {name!r}; pass another name=; order: {' ▸ '.join(wired)}"
                )
            wired[name] = read_stage(name, fn)
        self._stages = wired
        self._names = tuple(wired)
        self._given = tuple(record_of(record, "given") for record in given)
        self._plan = make_plan(wired, self._given)
        self._profiler = ProfilerProbe()

    def __repr__(self) -> str:
        return f"Pipeline({' ▸ '.join(self._stages)})"

    def __getitem__(self, name: str) -> StageFunction:
        """The callable of a stage.

        Raises:
            WiringError: there is no stage of that name.
        """
        return self._stages[self._known(name)].fn

    @property
    def names(self) -> tuple[str, ...]:
        """The stages, in order."""
        return self._names

    @property
    def stages(self) -> tuple[tuple[str, Stage], ...]:
        """Names and stages with their wiring, in order: what another pipeline can be built from."""
        return tuple(self._stages.items())

    @property
    def provides(self) -> frozenset[type[Any]]:
        """The classes of which there certainly is a record at the end, given ones included."""
        return frozenset(record.type for record in self._plan.at_end if not record.optional)

    @property
    def leaves(self) -> tuple[RecordType, ...]:
        """Every record that is, or may be (``X | None``), there at the end: the ``given`` of a pipeline to follow."""
        return tuple(_annotation(record) for record in self._plan.at_end)

    def describe(self) -> str:
        """The order, one line a stage: its name, what it takes and what it gives."""
        rows = [
            (name, ", ".join(str(parameter.record) for parameter in stage.takes) or "nothing", str(stage.gives))
            for name, stage in self._stages.items()
        ]
        names, takes = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        return "\n".join(f"{name:<{names}}  {taken:<{takes}}  → {gives}" for name, taken, gives in rows)

    def replace(self, name: str, fn: StageFunction) -> Pipeline:
        """Another callable in the place of stage ``name``; its annotations say what it takes and gives."""
        self._known(name)
        return self._edited((other, fn if other == name else stage) for other, stage in self._stages.items())

    def insert(
        self, fn: StageFunction, *, before: str | None = None, after: str | None = None, name: str | None = None
    ) -> Pipeline:
        """One more stage, beside an existing one. Its name is the callable's where none is given.

        Raises:
            WiringError: not exactly one of ``before`` and ``after``, or as for :class:`Pipeline`.
        """
        anchor = before if before is not None else after
        if anchor is None or (before is not None and after is not None):
            raise WiringError(f"insert() wants either before= or after=, one of: {self._listed()}")
        at = self.names.index(self._known(anchor)) + (before is None)
        stages: list[tuple[str, StageFunction]] = list(self._stages.items())
        return self._edited([*stages[:at], (name or default_name(fn), fn), *stages[at:]])

    def wrap(self, name: str, wrapper: Callable[[StageFunction], StageFunction]) -> Pipeline:
        """``wrapper(stage)`` in the place of stage ``name``.

        The result is called with what the stage is called with, and gives what it gives, unless it declares parameters
        of its own.
        """
        inner = self._stages[self._known(name)]
        if not callable(wrapper):
            raise WiringError(f"wrap({name!r}) wants a function that takes the stage, got {wrapper!r:.80}")
        return self.replace(name, rewire(name, wrapper(inner.fn), inner))

    def remove(self, name: str) -> Pipeline:
        """Without stage ``name``; a stage that needs its record is an error."""
        self._known(name)
        return self._edited((other, stage) for other, stage in self._stages.items() if other != name)

    def run(self, records: Records, observers: Observers | Sequence[StageObserver] = ()) -> Records:
        """Run every stage, filing what each gives in ``records``, which is returned.

        Raises:
            WiringError: a record is not there that was to be given. No stage ran.
            InputRefused: a stage refused the caller's input; as the stage raised it.
            StageFailed: a stage raised an Exception (the ``__cause__``), or returned what it does not declare.
                Step and requests are those of the transaction in ``records``.
        """
        if not self._plan.required <= records.keys():
            missing = ", ".join(sorted(record.__name__ for record in self._plan.required - records.keys()))
            raise WiringError(f"run() was not handed {missing}; order: {' ▸ '.join(self._stages)}")
        make_range = self._profiler.range()
        call: StageCall | None = None
        try:
            if observers or make_range is not None:
                watch = Observers.of(observers)
                hear_stages, ends = watch.hear_stages, list[int]()
                started = perf_counter_ns()
                try:
                    for call in self._plan.calls:
                        if make_range is not None:
                            with make_range(call.name):
                                _run_watched(call, records, watch)
                        elif hear_stages:
                            _run_watched(call, records, watch)
                        else:
                            call.run(records)
                        ends.append(perf_counter_ns())
                finally:
                    watch.after_run(self._names, started, ends)
            else:
                for call in self._plan.calls:
                    call.run(records)
        except InputRefused:
            raise
        except Exception as cause:
            assert call is not None, "only stages raise in the loop"
            transaction: Transaction | None = records.get(Transaction)
            step, request_ids = (None, ()) if transaction is None else (transaction.step, transaction.request_ids)
            raise StageFailed(call.name, step, request_ids, cause) from cause
        return records

    def _edited(self, stages: Iterable[tuple[str, StageFunction]]) -> Pipeline:
        return Pipeline(stages, (_annotation(record) for record in self._given))

    def _known(self, name: str) -> str:
        if name not in self._stages:
            raise WiringError(f"there is no stage {name!r}; there are: {self._listed()}")
        return name

    def _listed(self) -> str:
        return ", ".join(self._stages) or "none"


def _checked_pair(named: tuple[str, StageFunction]) -> tuple[str, StageFunction]:
    match named:
        case (str(name), _) if name:
            return named
        case _:
            raise WiringError(f"each stage is given as a pair of its name and a callable, got {named!r:.80}")


def _annotation(record: Record) -> RecordType:
    return record.type | None if record.optional else record.type


def _run_watched(call: StageCall, records: Records, watch: Observers) -> None:
    """One stage, with its observers told."""
    watch.before_stage(call.name)
    started = perf_counter()
    try:
        record = call.run(records)
    except BaseException as error:
        watch.stage_failed(call.name, error)
        raise
    seconds = perf_counter() - started
    watch.after_stage(call.name, seconds, record)
