"""The stages of a runner as its user edits them: one name a stage, whichever pipelines it is part of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..fsm import Pipeline, Transaction, WiringError
from ..fsm.wiring import Stage
from ..stages.io import GrammarOutput, SchedulerOutput
from ..stages.records import Batch, IntermediateTensors

NamedStages = Sequence[tuple[str, Callable[..., Any]]]

_GIVEN = (SchedulerOutput, Transaction, IntermediateTensors | None)
_NO_GRAPH = frozenset({"update_states", "dispatch"})
"""Stages of the first stroke that a captured graph does not depend on."""


class StageSet:
    """The pipelines of a step, edited together.

    ``execute`` and ``sample`` are the two strokes; ``sample`` starts from every record of ``execute``. ``skip`` is the
    short pipeline of a step that schedules nothing, ``dummy`` the first stroke on a given batch, not a scheduler's
    (profiling, warm-up, capture, an idle data-parallel rank). An edit reaches a stage wherever it occurs, gives checked
    pipelines or changes nothing, and is refused while a step is open.
    """

    def __init__(
        self,
        *,
        execute: NamedStages,
        sample: NamedStages,
        skip: NamedStages,
        between_steps: Callable[[str, Callable[[], None]], None],
        on_graph_edit: Callable[[str], None],
    ) -> None:
        """``between_steps(call, work)`` runs ``work`` while no step is open and none can start, or refuses ``call``."""
        self._between_steps = between_steps
        self._on_graph_edit = on_graph_edit
        self._set(Pipeline(execute, given=_GIVEN), sample=sample, skip=Pipeline(skip, given=_GIVEN))

    def _set(self, execute: Pipeline, *, sample: NamedStages, skip: Pipeline) -> None:
        second = Pipeline(sample, given=(*execute.leaves, GrammarOutput | None))
        without_requests = [stage for stage in execute.stages if stage[0] != "update_states"]
        dummy = Pipeline(without_requests, given=(*_GIVEN, Batch))
        self.execute, self.sample, self.skip, self.dummy = execute, second, skip, dummy

    @property
    def names(self) -> tuple[str, ...]:
        """Every stage of a step, in order."""
        return (*self.execute.names, *self.sample.names)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The stage of that name."""
        return self._stroke(name)[name]

    def replace(self, name: str, stage: Callable[..., Any]) -> None:
        """Put ``stage`` where ``name`` is, in every pipeline that has it.

        Raises:
            WiringError: no such stage, or the new one does not fit; nothing is changed.
            StepStateError: a step is open.
        """
        self._edit("stages.replace", name, lambda pipeline: pipeline.replace(name, stage))

    def wrap(self, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``name`` by ``wrapper(stage)``. Raises as :meth:`replace`."""
        self._edit("stages.wrap", name, lambda pipeline: pipeline.wrap(name, wrapper))

    def remove(self, name: str) -> None:
        """Take ``name`` out. Raises as :meth:`replace`."""
        self._edit("stages.remove", name, lambda pipeline: pipeline.remove(name))

    def insert(
        self, stage: Callable[..., Any], *, before: str | None = None, after: str | None = None, name: str | None = None
    ) -> None:
        """Put ``stage`` next to another one, in the stroke where that one is. Raises as :meth:`replace`."""
        anchor = before if before is not None else after
        if anchor is None or (before is not None and after is not None):
            raise WiringError("insert needs exactly one of before= and after=")
        stroke = self._stroke(anchor)
        edited = stroke.insert(stage, before=before, after=after, name=name)
        execute, sample = (edited, self.sample) if stroke is self.execute else (self.execute, edited)
        self._apply("stages.insert", anchor, execute, sample, self.skip)

    @contextmanager
    def restored(self) -> Iterator[StageSet]:
        """Undo every edit made inside the ``with`` block when it ends; refused like an edit where a step is open.

        Where the block raises, its exception is what is raised, with a note if the edits could not be undone.
        """
        before = (self.execute, self.sample, self.skip, self.dummy)

        def restore() -> None:
            if _captured(before[0]) != _captured(self.execute):
                self._on_graph_edit("the stages were restored")
            self.execute, self.sample, self.skip, self.dummy = before

        try:
            yield self
        except BaseException as error:
            try:
                self._between_steps("stages.restored", restore)
            except Exception as failure:
                error.add_note(f"stages.restored() left the edits in place: {type(failure).__name__}: {failure}")
            raise
        self._between_steps("stages.restored", restore)

    def describe(self) -> str:
        """Each stroke with what its stages take and give."""
        return f"execute_model\n{self.execute.describe()}\nsample_tokens\n{self.sample.describe()}"

    def _stroke(self, name: str) -> Pipeline:
        for stroke in (self.execute, self.sample):
            if name in stroke.names:
                return stroke
        raise WiringError(f"there is no stage {name!r}; stages: {' ▸ '.join(self.names)}")

    def _edit(self, call: str, name: str, edit: Callable[[Pipeline], Pipeline]) -> None:
        stroke = self._stroke(name)
        edited = edit(stroke)
        execute, sample = (edited, self.sample) if stroke is self.execute else (self.execute, edited)
        skip, left = self.skip, dict(edited.stages)
        if name in skip.names:  # the very same stage in both: it may have a state
            skip = skip.replace(name, left[name]) if name in left else skip.remove(name)
        self._apply(call, name, execute, sample, skip)

    def _apply(self, call: str, name: str, execute: Pipeline, sample: Pipeline, skip: Pipeline) -> None:
        def apply() -> None:
            touches_graphs = _captured(execute) != _captured(self.execute)
            self._set(execute, sample=sample.stages, skip=skip)
            if touches_graphs:
                self._on_graph_edit(f"stage {name!r} was edited")

        self._between_steps(call, apply)


def _captured(execute: Pipeline) -> list[tuple[str, Stage]]:
    """The stages whose records a captured graph depends on: up to forward, probes and dispatch aside."""
    stages: list[tuple[str, Stage]] = []
    for name, stage in execute.stages:
        if name not in _NO_GRAPH and stage.gives is not None:
            stages.append((name, stage))
        if name == "forward":
            break
    return stages
