"""What a stage takes and gives, read from its annotations."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from attrs import frozen

from .errors import WiringError

StageFunction = Callable[..., object]
RecordType = type | types.UnionType
"""A record's class, or ``X | None`` for a record that may be missing."""

_WAY_OUT = (
    "annotate every parameter and the return with a record class, X | None or None, "
    "or say it with stage(fn, takes=(...), gives=...)"
)


@frozen
class Record:
    """A record type in a signature; ``optional`` where it was written ``X | None``."""

    type: type[Any]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.type.__name__} | None" if self.optional else self.type.__name__


@frozen
class Parameter:
    """A parameter that is bound to a record. ``has_default``: keep the default where nothing gives the record."""

    name: str
    record: Record
    keyword_only: bool = False
    has_default: bool = False


@frozen(eq=False)
class Stage:
    """A callable and its wiring. Calling it calls ``fn``."""

    fn: StageFunction
    takes: tuple[Parameter, ...]
    gives: Record | None
    name: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        return self.fn(*args, **kwargs)


def stage(
    fn: StageFunction, *, takes: Iterable[RecordType] = (), gives: RecordType | None = None, name: str | None = None
) -> Stage:
    """Say what ``fn`` takes (positionally, in this order) and gives, where its annotations can't be read.

    Each is a record class, or ``X | None``. For a local class in a notebook, an ``nn.Module``, a lambda.

    Raises:
        WiringError: something that is not a record class.
    """
    label = f"stage({name or fn!r})"
    parameters = tuple(
        Parameter(f"takes[{index}]", record_of(annotation, label)) for index, annotation in enumerate(takes)
    )
    return Stage(fn, parameters, None if gives is None else record_of(gives, label), name)


def read_stage(name: str, fn: StageFunction) -> Stage:
    """``fn`` with the wiring of its annotations; a :class:`Stage` as it is.

    Functions, bound methods, partials, decorated functions and objects with ``__call__`` can be read.

    Raises:
        WiringError: annotations that are missing or not records; the message names the way out.
    """
    if isinstance(fn, Stage):
        return fn
    if isinstance(fn, type):
        raise WiringError(f"stage {name!r} is the class {fn.__name__}; pass an instance, {fn.__name__}(...)")
    if not callable(fn):
        raise WiringError(f"stage {name!r} is a {type(fn).__name__}, which cannot be called")
    owner, bound_keywords = _annotated(fn)
    try:
        signature = inspect.signature(fn)
        hints = typing.get_type_hints(owner)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise WiringError(f"cannot read the annotations of stage {name!r} ({error}): {_WAY_OUT}") from error
    parameters = tuple(
        _parameter(name, parameter, hints)
        for parameter in signature.parameters.values()
        if parameter.kind not in _VARIADIC and parameter.name not in bound_keywords
    )
    if "return" not in hints or (signature.parameters and not _named(signature)):
        missing = "its return" if "return" not in hints else "its parameters"
        raise WiringError(f"cannot read the annotations of stage {name!r} ({missing}): {_WAY_OUT}")
    returned = hints["return"]
    gives = None if returned is types.NoneType else record_of(returned, f"stage {name!r}, return")
    return Stage(fn, parameters, gives, name)


def rewire(name: str, fn: StageFunction, inner: Stage) -> Stage:
    """The stage of a callable that wraps ``inner``: its own wiring if it declares one, else that of ``inner``."""
    if not callable(fn):
        raise WiringError(f"the wrapper of stage {name!r} returned a {type(fn).__name__}, which cannot be called")
    if getattr(fn, "__wrapped__", None) is not inner.fn and _declares_wiring(fn):
        return read_stage(name, fn)
    return Stage(fn, inner.takes, inner.gives, name)


def record_of(annotation: object, where: str) -> Record:
    """The record of an annotation.

    Raises:
        WiringError: it is neither a class nor ``X | None`` of a class.
    """
    members = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = list(typing.get_args(annotation))
    classes = [member for member in members if member is not types.NoneType]
    if len(classes) != 1 or not _is_record_class(classes[0]):
        shown = annotation if not isinstance(annotation, type) else annotation.__name__
        raise WiringError(f"{where}: {shown!s} does not name one record class: {_WAY_OUT}")
    record_class = typing.cast("type[Any]", classes[0])
    return Record(record_class, optional=len(members) == 2)


def default_name(fn: StageFunction) -> str:
    """What a stage is called that was given no name: its own, a function's, or a class's in snake_case.

    Raises:
        WiringError: there is none, as for a lambda.
    """
    if isinstance(fn, Stage):
        return fn.name or default_name(fn.fn)
    if isinstance(fn, functools.partial):
        return default_name(typing.cast("functools.partial[object]", fn).func)
    name = getattr(fn, "__name__", None) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(fn).__name__).lower()
    if not name.isidentifier():
        raise WiringError(f"{name} has no name that a stage could have; pass name=...")
    return name


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _named(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind not in _VARIADIC]


def _annotated(fn: Any) -> tuple[Any, frozenset[str]]:
    """The function that carries the annotations of ``fn``, and the parameters that partials have bound by keyword."""
    bound: frozenset[str] = frozenset()
    while True:
        if isinstance(fn, functools.partial):
            partial = typing.cast("functools.partial[object]", fn)
            bound |= partial.keywords.keys()
            fn = partial.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif inspect.isroutine(fn):
            return fn, bound
        else:
            return type(fn).__call__, bound


def _parameter(stage_name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Parameter:
    if parameter.name not in hints:
        if parameter.annotation is inspect.Parameter.empty:
            raise WiringError(f"stage {stage_name!r}: parameter {parameter.name!r} has no annotation: {_WAY_OUT}")
        raise WiringError(f"cannot read the annotations of stage {stage_name!r} ({parameter}): {_WAY_OUT}")
    record = record_of(hints[parameter.name], f"stage {stage_name!r}, parameter {parameter.name!r}")
    default = parameter.default
    # A parameter `x: X | None = None` needs no default: nothing given binds None anyway. A positional-only one cannot
    # be left out and followed by others, so its default does not count.
    has_default = (
        default is not inspect.Parameter.empty
        and not (default is None and record.optional)
        and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    )
    return Parameter(parameter.name, record, parameter.kind is inspect.Parameter.KEYWORD_ONLY, has_default)


def _declares_wiring(fn: StageFunction) -> bool:
    """Whether ``fn`` says what it takes: an annotated parameter, or no parameter at all. ``*args`` says nothing."""
    if isinstance(fn, Stage):
        return True
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    annotated = any(parameter.annotation is not inspect.Parameter.empty for parameter in _named(signature))
    return annotated or not signature.parameters


def _is_record_class(candidate: object) -> bool:
    """A class that ``isinstance`` accepts: no generic alias, no protocol that is not runtime_checkable."""
    if not isinstance(candidate, type) or candidate is object:
        return False
    try:
        isinstance(None, candidate)
    except TypeError:
        return False
    return True
