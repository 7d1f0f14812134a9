"""Types and values in JSON schemas: what fits, and what can't be two things at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list, tuple),
    "number": (int, float),
}


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under ``type``; none where there is none, or nothing that could be one."""
    found = schema.get("type", ())
    names = (found,) if isinstance(found, str) else found
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list | tuple) else ()


def fits_type(value: object, name: str) -> bool:
    """Whether a value is of a JSON type."""
    if name == "integer":
        return fits_type(value, "number") and (not isinstance(value, float) or value.is_integer())
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _KINDS.get(name, ()))


def are_disjoint(left: Any, right: Any) -> bool:
    """Whether it is plain to see that no value satisfies two schemas (references are not followed)."""
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return False
    types, others = ({"number" if name == "integer" else name for name in types_of(side)} for side in (left, right))
    if types and others and not types & others:
        return True
    values, other_values = _values(left), _values(right)
    if values is not None and other_values is not None:
        return not any(value == other for value in values for other in other_values)
    return any(
        are_disjoint(left["properties"][name], right["properties"][name])
        for name in _required(left)
        if name in _required(right)
    )


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that a schema lets through, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list | tuple) else None


def _required(schema: Mapping[str, Any]) -> list[str]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return []
    return [name for name in required if name in properties]
