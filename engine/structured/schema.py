"""JSON schemas without what the compiler would pass over: a constraint is enforced, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from .expressions import checked_pattern
from .schema_values import are_disjoint, fits_type, types_of
from .spec import InvalidGrammar

MAX_DEPTH = 64
_FIELD = "json_schema"
_NOT_ENFORCED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with one branch for each case",
    "contains": "use items, or prefixItems",
    "dependentRequired": "use anyOf with one branch for each case",
    "dependentSchemas": "use anyOf with one branch for each case",
    "dependencies": "use anyOf with one branch for each case",
    "$dynamicRef": "use $ref with '#/…'",
    "$recursiveRef": "use $ref with '#'",
}
_NEEDS_TYPE = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format",
)  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# The compiler's own lets numbers begin with zeros.
_IPV4_PART = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {"ipv4": rf"{_IPV4_PART}(\.{_IPV4_PART}){{3}}"}
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_CONSTRAINTS = frozenset(
    (*_NEEDS_TYPE, "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
     "minProperties", "maxProperties", "unevaluatedProperties", "items", "prefixItems", "minItems", "maxItems",
     "unevaluatedItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
)  # fmt: skip
_WHOLE = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")


def checked_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema as the compiler takes it.

    Raises:
        InvalidGrammar: a keyword, or a combination of keywords, that would not be enforced; names the place.
    """
    return _Checker(schema).checked(schema, "", MAX_DEPTH)


class _Checker:
    """Walks a schema; ``root`` is what its references start from."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def checked(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _refused(path, f"must be a schema, got {schema!r:.80}")
        if not depth:
            raise _refused("", f"is nested more than {MAX_DEPTH} deep")
        _check_keywords(schema, path)
        _check_whole(schema, path)
        self._check_branches(schema, path)
        _check_strings(schema, path)
        _check_objects(schema, path)
        result = dict(schema)
        for name in _MAPS:
            if isinstance(found := schema.get(name), Mapping):
                result[name] = {
                    key: self.checked(child, f"{path}/{name}/{key}", depth - 1) for key, child in found.items()
                }
        for name in _LISTS:
            if isinstance(found := schema.get(name), list | tuple):
                result[name] = [
                    self.checked(child, f"{path}/{name}/{index}", depth - 1) for index, child in enumerate(found)
                ]
        for name in _SINGLE:
            if name in schema and not isinstance(found := schema[name], list | tuple):
                if name == "propertyNames" and isinstance(found, Mapping):
                    found = {"type": "string", **found}  # they are nothing else
                result[name] = self.checked(found, f"{path}/{name}", depth - 1)
        if "array" in types_of(schema) and not {"items", "prefixItems"} & schema.keys():
            result["items"] = True  # else the compiler takes limits to be about nothing
        if isinstance(found := schema.get("format"), str) and found in _FORMATS:
            result["pattern"] = _FORMATS[result.pop("format")]
        return result | _with_patterns(result, path)

    def _check_branches(self, schema: Mapping[str, Any], path: str) -> None:
        branches = schema.get("oneOf")
        if not isinstance(branches, list | tuple):
            return
        for left, right in combinations(map(self._resolved, branches), 2):
            if not are_disjoint(left, right):
                raise _refused(
                    f"{path}/oneOf",
                    "has branches that may both be true; use anyOf, or give each a required property with a const of "
                    "its own",
                )

    def _resolved(self, schema: Any) -> Any:
        """What a reference within the document refers to; anything else as it is."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = self._root
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def _with_patterns(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keywords that hold expressions, as the compiler reads them."""
    changed: dict[str, Any] = {}
    if "pattern" in schema:
        changed["pattern"] = checked_pattern(f"{_FIELD}{path}/pattern", schema["pattern"])
    if isinstance(found := schema.get("patternProperties"), Mapping):
        where = f"{_FIELD}{path}/patternProperties"
        changed["patternProperties"] = {checked_pattern(where, key): child for key, child in found.items()}
    return changed


def _refused(path: str, reason: str) -> InvalidGrammar:
    return InvalidGrammar(_FIELD + path, reason)


def _check_keywords(schema: Mapping[str, Any], path: str) -> None:
    for name in schema:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refused(path, f"has the key {name!r:.80}, which is no string")
        if name in _NOT_ENFORCED:
            raise _refused(f"{path}/{name}", f"is not supported; {_NOT_ENFORCED[name]}")
    for name in _COUNTS:
        if isinstance(count := schema.get(name), int | float) and count < 0:
            raise _refused(f"{path}/{name}", f"must be 0 or more, got {count!r:.80}")
    if schema.get("uniqueItems"):
        raise _refused(f"{path}/uniqueItems", "is not supported; leave it out and check for it afterwards")
    types = types_of(schema)
    for name in _NEEDS_TYPE:
        if name in schema and not types:
            raise _refused(f"{path}/{name}", 'needs a "type" beside it')
    if "multipleOf" in schema and "number" in types:
        raise _refused(f"{path}/multipleOf", 'is supported with "type": "integer" only')


def _check_whole(schema: Mapping[str, Any], path: str) -> None:
    """Forms that say all there is to say: the compiler reads one of them and nothing beside it."""
    whole = [name for name in _WHOLE if name in schema]
    if not whole:
        return
    name = whole[0]
    beside = [key for key in schema if key in _CONSTRAINTS and key != name]
    if name in ("enum", "const"):
        beside = [key for key in beside if key != "type"]
        values = schema["enum"] if name == "enum" else [schema["const"]]
        types = types_of(schema)
        if types and isinstance(values, Sequence):
            for value in values:
                if not any(fits_type(value, one) for one in types):
                    raise _refused(f"{path}/{name}", f"holds {value!r:.80}, which is not of the type beside it")
    if beside:
        raise _refused(f"{path}/{beside[0]}", f"is not enforced beside {name}; move it into what {name} names")
    branches = schema[name]
    if name == "allOf" and isinstance(branches, list | tuple) and len(branches) > 1:
        raise _refused(f"{path}/allOf", "with more than one schema is not supported; merge them into one")
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise _refused(f"{path}/$ref", f"{reference!r:.80} is not supported; refer to '#' or '#/…'")


def _check_strings(schema: Mapping[str, Any], path: str) -> None:
    given = [name for name in _OF_STRINGS if name in schema]
    if len(given) > 1 and given != ["minLength", "maxLength"]:
        raise _refused(f"{path}/{given[0]}", f"is not enforced beside {given[-1]}; say all of it in the pattern")
    if not isinstance(schema.get("pattern", ""), str):
        raise _refused(f"{path}/pattern", f"must be a string, got {schema['pattern']!r:.80}")


def _check_objects(schema: Mapping[str, Any], path: str) -> None:
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return  # the compiler says so
    for name in required:
        if name not in properties:
            raise _refused(f"{path}/required", f"names {name!r:.80}, which properties does not describe")
    for other in ("patternProperties", "propertyNames"):
        if properties and other in schema:
            raise _refused(f"{path}/{other}", "is not enforced beside properties; use one of the two")
