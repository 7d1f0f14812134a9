"""Run a candidate beside a stage, on the same records, and count where the two disagree. The step notices nothing.

watch = shadow("build_attn", MyBuildAttn(...), compare=within(absolute=1e-5))
with watch.beside(runner.stages):
    ...                                    # serve
print(watch.summary())
watch.first                                # where it happened, with the records that went in and came out
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from attrs import frozen

from ..fsm import Transaction, WiringError
from ..fsm.wiring import Parameter, Record, Stage, StageFunction, read_stage, rewire
from .shadow_compare import Compare, copied, exact
from .stage_set import StageSet

_Records = Mapping[type[Any], Any]


@frozen(eq=False)
class Divergence:
    """A step in which the candidate failed or gave something else.

    ``difference`` says where they differ. ``inputs`` has what both took, by class, ``real`` and ``candidate`` what each
    gave (None from a candidate that raised ``error``): copies, which outlive the step.
    """

    step: int
    request_ids: tuple[str, ...]
    difference: str
    inputs: _Records
    real: Any
    candidate: Any
    error: Exception | None = None


class Shadow:
    """A wrapper of a stage, for ``runner.stages.wrap(name, shadow)`` or :meth:`beside`; see :func:`shadow`.

    ``num_agreed``, ``num_diverged`` and ``num_failed`` count steps, ``first`` is the first that did not agree.
    ``seconds`` and ``candidate_seconds`` are host time in the one and in the other.
    """

    def __init__(self, name: str, candidate: StageFunction, compare: Compare) -> None:
        self.name = name
        self.num_agreed = self.num_diverged = self.num_failed = 0
        self.first: Divergence | None = None
        self.seconds = self.candidate_seconds = 0.0
        self._candidate = candidate
        self._compare = compare

    def __call__(self, stage: StageFunction) -> Stage:
        """``stage`` with the candidate beside it.

        Raises:
            WiringError: the candidate gives another record, or its annotations can't be read.
        """
        real = read_stage(self.name, stage)
        candidate = rewire(self.name, self._candidate, real)
        if candidate.gives != real.gives:
            raise WiringError(
                f"the shadow of stage {self.name!r} gives {candidate.gives}, the stage gives {real.gives}; "
                "a candidate gives what the stage gives"
            )
        takes = _taken_by(real, candidate)

        def beside(*args: Any) -> object:
            records = dict(zip((parameter.record.type for parameter in takes), args, strict=True))
            return self._run(real, candidate, records)

        return Stage(beside, takes, real.gives, self.name)

    @contextmanager
    def beside(self, stages: StageSet) -> Iterator[Shadow]:
        """Wrap the stage of ``runner.stages`` for a ``with`` block.

        Raises:
            StepStateError: a step is open, at the start or at the end.
            WiringError: as for a call.
        """
        with stages.restored():
            stages.wrap(self.name, self)
            yield self

    @property
    def num_steps(self) -> int:
        """Steps in which both were run."""
        return self.num_agreed + self.num_diverged + self.num_failed

    def summary(self) -> str:
        """The counts in a line, and where it first went wrong in another."""
        counts = f"{self.num_agreed} agreed, {self.num_diverged} diverged, {self.num_failed} failed"
        line = f"shadow of {self.name!r}: {self.num_steps} steps, {counts}"
        if self.first is None:
            return line
        requests = ", ".join(self.first.request_ids[:4]) + (", …" if len(self.first.request_ids) > 4 else "")
        return f"{line}\n  first in step {self.first.step} ({requests}): {self.first.difference}"

    def _run(self, real: Stage, candidate: Stage, records: dict[type[Any], Any]) -> object:
        transaction: Transaction = records[Transaction]
        if not transaction.step:  # a dummy run: there is nothing to compare
            return _call(real, records)
        # The candidate goes first: what it writes where the stage writes too is overwritten by the stage.
        output, error = self._run_candidate(candidate, records, transaction)
        started = perf_counter()
        result = _call(real, records)
        self.seconds += perf_counter() - started
        difference = f"{type(error).__name__}: {error}" if error is not None else self._difference(result, output)
        if difference is None:
            self.num_agreed += 1
            return result
        if error is None:
            self.num_diverged += 1
        else:
            self.num_failed += 1
        if self.first is None:
            inputs = {kind: copied(record) for kind, record in records.items() if kind is not Transaction}
            request_ids = tuple(transaction.request_ids)
            self.first = Divergence(transaction.step, request_ids, difference, inputs, copied(result), output, error)
        return result

    def _run_candidate(
        self, candidate: Stage, records: dict[type[Any], Any], transaction: Transaction
    ) -> tuple[Any, Exception | None]:
        """A copy of what the candidate gives for copies of the records; its own transaction is undone."""
        own = Transaction(transaction.step, transaction.request_ids)
        given = {kind: own if kind is Transaction else copied(record) for kind, record in records.items()}
        output, error = None, None
        started = perf_counter()
        try:
            with torch.random.fork_rng(devices=()):
                output = copied(_call(candidate, given))
        except Exception as raised:
            error = raised
        finally:
            self.candidate_seconds += perf_counter() - started
            try:
                own.rollback()
            except Exception as raised:
                error = raised
        return output, error

    def _difference(self, real: Any, output: Any) -> str | None:
        try:
            return self._compare(real, output)
        except Exception as error:
            return f"compare raised {type(error).__name__}: {error}"


def shadow(name: str, candidate: StageFunction, *, compare: Compare = exact) -> Shadow:
    """Prepare to run ``candidate`` beside the stage ``name``, on the same records.

    ``compare(real, candidate)`` gets what the two gave, and says in a few words where they differ, or None:
    :func:`~twostroke.engine.shadow_compare.exact` (field by field, tensors element by element), ``within(...)`` with a
    tolerance, or a function of one's own.

    The candidate takes what its annotations say, of the records that are there when the stage runs; it gives the same
    record as the stage. It runs first, gets copies of arrays and tensors, and a transaction of its own, which is undone
    at once. What it raises is counted. Nothing can protect what it reaches by other ways: buffers that it writes and
    the stage does not rewrite, the KV cache, random generators on a GPU, a table that it changes without an
    ``on_undo``. Give it buffers and plans of its own.

    A shadow of a stage that graphs depend on drops them, and the forward stage can't be captured while it has one.
    """
    return Shadow(name, candidate, compare)


def _taken_by(real: Stage, candidate: Stage) -> tuple[Parameter, ...]:
    """One parameter for each record that either takes, and the transaction; needed where either needs it."""
    wanted: dict[type[Any], Record] = {Transaction: Record(Transaction)}
    for parameter in (*real.takes, *candidate.takes):
        record = parameter.record
        is_optional = record.optional or parameter.has_default
        before = wanted.get(record.type)
        wanted[record.type] = Record(record.type, is_optional and (before is None or before.optional))
    return tuple(Parameter(f"takes[{index}]", record) for index, record in enumerate(wanted.values()))


def _call(stage: Stage, records: _Records) -> object:
    """Call a stage; a parameter with a default keeps it where nothing gave the record."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    left_out = False
    for parameter in stage.takes:
        value = records[parameter.record.type]
        if value is None and parameter.has_default:
            left_out = True
        elif parameter.keyword_only or left_out:
            keywords[parameter.name] = value
        else:
            positional.append(value)
    return stage.fn(*positional, **keywords)
