"""Copies of records that outlive their step, and what differs between two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

Compare = Callable[[Any, Any], str | None]
"""Says where two records differ, in a few words, or None. The first is the real one, the second the candidate's."""


def exact(real: Any, candidate: Any) -> str | None:
    """The first difference in any field. Tensors agree in shape, type and every element; NaN equals NaN.

    attrs records, tuples, lists and mappings are looked into. Of other objects that can't be compared by ``==`` (plans,
    handles) only the class is.
    """
    return _difference(real, candidate, "", 0.0, 0.0)


def within(*, absolute: float = 0.0, relative: float = 0.0) -> Compare:
    """Like :func:`exact`, but real numbers may differ by ``absolute + relative * abs(real)``."""
    return partial(_within, absolute, relative)


def _within(absolute: float, relative: float, real: Any, candidate: Any) -> str | None:
    return _difference(real, candidate, "", absolute, relative)


def copied(record: Any) -> Any:
    """``record`` with copies of its tensors and arrays, in the same structure; what holds none is not copied."""
    if isinstance(record, torch.Tensor):
        return record.clone()
    if isinstance(record, np.ndarray):
        return record.copy()
    if isinstance(record, Mapping):
        values = {key: copied(value) for key, value in record.items()}
        return values if any(values[key] is not value for key, value in record.items()) else record
    if isinstance(record, (tuple, list)):
        items = [copied(item) for item in record]
        if all(item is old for item, old in zip(items, record, strict=True)):
            return record
        return type(record)(*items) if hasattr(record, "_fields") else type(record)(items)
    if attrs.has(type(record)):
        fields = [field for field in attrs.fields(type(record)) if field.init]
        values = {field.alias: copied(getattr(record, field.name)) for field in fields}
        if all(values[field.alias] is getattr(record, field.name) for field in fields):
            return record
        return attrs.evolve(record, **values)
    return record


def _difference(real: Any, other: Any, path: str, absolute: float, relative: float) -> str | None:
    where = path or type(real).__name__
    if isinstance(real, (torch.Tensor, np.ndarray)):
        return _array_difference(real, other, where, absolute, relative)
    if type(real) is not type(other):
        return f"{where}: {type(real).__name__} and {type(other).__name__}"
    pairs = _parts(real, other)
    if pairs is None:
        return _value_difference(real, other, where, absolute, relative)
    for name, one, two in pairs:
        if found := _difference(one, two, f"{where}{name}", absolute, relative):
            return found
    return None


def _parts(real: Any, other: Any) -> Iterator[tuple[str, Any, Any]] | None:
    """Names and parts of two records of one class; None if they have none. Missing parts are :data:`MISSING`."""
    if attrs.has(type(real)):
        names = [field.name for field in attrs.fields(type(real)) if field.eq]  # others say nothing of their own
        return ((f".{name}", getattr(real, name), getattr(other, name)) for name in names)
    if hasattr(real, "_fields"):
        return ((f".{name}", getattr(real, name), getattr(other, name)) for name in real._fields)
    if isinstance(real, Mapping):
        keys = dict.fromkeys((*real, *other))
        return ((f"[{key!r}]", real.get(key, MISSING), other.get(key, MISSING)) for key in keys)
    if isinstance(real, Sequence) and not isinstance(real, (str, bytes)):
        items = [(f"[{index}]", one, two) for index, (one, two) in enumerate(zip(real, other, strict=False))]
        return iter([(".length", len(real), len(other)), *items])
    return None


class Missing:
    """Stands for the value of a key that only the other mapping has."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def _value_difference(real: Any, other: Any, where: str, absolute: float, relative: float) -> str | None:
    if type(real).__eq__ is object.__eq__ or real == other:
        return None
    if isinstance(real, float) and math.isnan(real) and math.isnan(other):
        return None
    if isinstance(real, float) and abs(real - other) <= absolute + relative * abs(real):
        return None
    return f"{where}: {real!r:.60} and {other!r:.60}"


def _array_difference(real: Any, other: Any, where: str, absolute: float, relative: float) -> str | None:
    if isinstance(real, torch.Tensor) is not isinstance(other, torch.Tensor) or not hasattr(other, "shape"):
        return f"{where}: {type(real).__name__} and {type(other).__name__}"
    if real.shape != other.shape or real.dtype != other.dtype:
        return f"{where}: {list(real.shape)} {real.dtype} and {list(other.shape)} {other.dtype}"
    one, two = torch.as_tensor(real), torch.as_tensor(other, device=getattr(real, "device", None))
    if one.is_floating_point():
        unequal = ~torch.isclose(two, one, rtol=relative, atol=absolute, equal_nan=True)
    else:
        unequal = one != two
    count = int(unequal.sum())
    if not count:
        return None
    first = tuple(unequal.nonzero()[0].tolist())
    most = f", by {float((one.double() - two.double())[unequal].abs().max()):.3g} at most"
    return f"{where}: {count} of {one.numel()} differ{most}, first at {list(first)}: {one[first]} and {two[first]}"
