"""Stages from elsewhere: found by name, made for a runner, put in their place.

A package offers stages under names of its choice in its ``pyproject.toml``::

    [project.entry-points."twostroke.stages"]
    min_k = "my_package:MinKSampler"

and ``twostroke generate --stage sample=min_k`` (or ``EngineConfig(stages=[("sample", "min_k")])``) uses it. Without an
entry point, ``my_package:MinKSampler`` and ``path/to/file.py:MinKSampler`` name the same thing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..fsm import TwoStrokeError

if TYPE_CHECKING:
    from .assembly import Assembly

GROUP = "twostroke.stages"
"""The group of entry points that stages are found under."""

AFTER, BEFORE = "after:", "before:"
"""A place that starts with one of these is next to a stage; any other is that of a stage."""


class PluginError(TwoStrokeError, ValueError):
    """A stage that can't be found or made; the message names it and what would work."""


@runtime_checkable
class StageFactory(Protocol):
    """A class whose stages need a runner's parts: tables, buffers, the stage that they replace.

    ``from_runner`` may call ``parts.table.add_column``: no request is live when a runner is built.
    """

    @classmethod
    def from_runner(cls, parts: Assembly) -> Callable[..., Any]:
        """A stage for one runner."""
        ...


def find_stage(spec: str) -> Any:
    """What ``spec`` names: an entry point, ``package.module:name``, or ``path/to/file.py:name``.

    Raises:
        PluginError: nothing is there; the cause is what importing it raised.
    """
    source, colon, attribute = spec.rpartition(":")
    if not colon:
        return _entry_point(spec)
    if not source or not attribute:
        raise PluginError(f"stage {spec!r}: write package.module:name, path/to/file.py:name, or an entry point's name")
    found: Any = _module(spec, source)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise PluginError(f"stage {spec!r}: there is no {name!r} in {getattr(found, '__name__', found)}")
        found = getattr(found, name)
    return found


def load_stage(spec: str, parts: Assembly | None = None) -> Callable[..., Any]:
    """The stage that ``spec`` names (see :func:`find_stage`), made for a runner with these ``parts``.

    A :class:`StageFactory` is asked for one, another class is called without arguments, and any other callable is the
    stage itself.

    Raises:
        PluginError: it can't be found or made, or needs parts and there are none.
    """
    found = find_stage(spec)
    try:
        if isinstance(found, StageFactory):
            if parts is None:
                raise PluginError(f"stage {spec!r} needs the parts of a runner: load_stage(spec, runner.parts)")
            found = found.from_runner(parts)
        elif isinstance(found, type):
            found = found()
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"stage {spec!r} can't be made: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"stage {spec!r} is a {type(found).__name__}, which can't be called")
    return found


def split_stage(text: str) -> tuple[str, str]:
    """The place and the spec of ``PLACE=SPEC``, as the command line takes it.

    Raises:
        PluginError: it has no such form.
    """
    place, equals, spec = text.partition("=")
    if not (place and equals and spec):
        raise PluginError(f"stage {text!r}: write PLACE=SPEC, such as sample=my_package:MinKSampler")
    return place, spec


def split_extra(text: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``, for ``SamplingParams.extra``; a value that is no JSON is a string.

    Raises:
        PluginError: it has no such form.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise PluginError(f"extra {text!r}: write NAME=VALUE, such as min_k=8")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def apply_stages(stages: Iterable[tuple[str, str | Callable[..., Any]]], parts: Assembly) -> None:
    """Edit the stages of a runner: each is put where its place says, one after the other.

    A place is the name of the stage to replace, ``after:NAME``, or ``before:NAME``. A stage is given as it is, or by
    what :func:`load_stage` takes.

    Raises:
        PluginError: one can't be found or made.
        WiringError: one does not fit; those before it are in place.
    """
    for place, spec in stages:
        stage = load_stage(spec, parts) if isinstance(spec, str) else spec
        if place.startswith(AFTER):
            parts.stages.insert(stage, after=place.removeprefix(AFTER))
        elif place.startswith(BEFORE):
            parts.stages.insert(stage, before=place.removeprefix(BEFORE))
        else:
            parts.stages.replace(place, stage)


def _entry_point(name: str) -> Any:
    entry_points = importlib.metadata.entry_points(group=GROUP)
    named = [entry_point for entry_point in entry_points if entry_point.name == name]
    targets = sorted({entry_point.value for entry_point in named})
    if not named:
        known = ", ".join(sorted(entry_points.names)) or "none is installed"
        raise PluginError(
            f"stage {name!r} is no entry point of the group {GROUP!r} (known: {known}); "
            "or name it package.module:name or path/to/file.py:name"
        )
    if len(targets) > 1:
        raise PluginError(f"stage {name!r} is offered more than once: {', '.join(targets)}; name one of these instead")
    return find_stage(targets[0])


def _module(spec: str, source: str) -> ModuleType:
    try:
        return _file_module(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise PluginError(f"stage {spec!r}: {source} can't be imported: {type(error).__name__}: {error}") from error


def _file_module(path: Path) -> ModuleType:
    """The module of a file, the same one each time. Its name can't be that of an importable module."""
    name = f"twostroke_stages:{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
