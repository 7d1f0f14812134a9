"""What a grammar may be made of: specifications, expressions, schemas."""

from __future__ import annotations

from typing import Any

import pytest
from twostroke.engine.structured import GrammarSpec, InvalidGrammar
from twostroke.engine.structured.expressions import checked_expression, checked_pattern
from twostroke.engine.structured.schema import MAX_DEPTH, checked_schema


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json_object": True}, "json_object", "true"),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"regex": ""}, "regex", ""),
        ({"choice": ["yes", "né"]}, "choice", '["yes", "né"]'),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_one_field_says_it(fields: dict[str, Any], kind: str, text: str) -> None:
    spec = GrammarSpec(**fields)
    assert (spec.kind, spec.text) == (kind, text)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "grammar", "give one of json_object, json_schema"),
        ({"json_object": False}, "grammar", "got none"),
        ({"json_object": 1}, "json_object", "must be true or false"),
        ({"regex": "a", "choice": ["b"]}, "choice", "got regex and choice"),
        ({"json_schema": "{}"}, "json_schema", "must be a JSON object"),
        ({"json_schema": {"const": float("nan")}}, "json_schema", "no JSON"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema", "no JSON"),
        ({"regex": 5}, "regex", "must be a string"),
        ({"regex": "\ud800"}, "regex", "whole characters"),
        ({"grammar": ["root"]}, "grammar", "must be a string"),
        ({"choice": []}, "choice", "nothing to choose from"),
        ({"choice": ["a", ""]}, "choice", "empty text"),
        ({"choice": "abc"}, "choice", "list of strings"),
        ({"choice": ["a", 1]}, "choice", "list of strings"),
        ({"grammar": "#" * 65_537}, "grammar", "65537 bytes; at most 65536"),
    ],
)
def test_anything_else_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words) as caught:
        GrammarSpec(**fields)
    assert caught.value.field == field


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    with pytest.raises(InvalidGrammar, match="Circular"):
        GrammarSpec(json_schema=schema)


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        (r"^a$", r"^a$"),
        (r"(^a$|^b$)c?", None),
        (r"^(a|b)$", r"^(a|b)$"),
        (r"a|^b$", r"a|^b$"),
        (r"[$^]\$\^", r"[$^]\$\^"),
        (r"a^b", None),
        (r"a$b", None),
        (r"\x41b", r"\u0041b"),
        (r"\\x41", r"\\x41"),
    ],
)
def test_expressions(text: str, checked: str | None) -> None:
    if checked is None:
        with pytest.raises(InvalidGrammar, match="inside of an expression"):
            checked_expression("regex", text)
    else:
        assert checked_expression("regex", text) == checked


@pytest.mark.parametrize("text", ['a"b', r"a\\b", r"\n", r"\x09", r"\u0022", r'["]', "\t", r"\x5c"])
def test_patterns_hold_nothing_that_json_escapes(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="escaped in JSON") as caught:
        checked_pattern("json_schema/pattern", text)
    assert caught.value.field == "json_schema/pattern"


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
KINDS = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "/not"),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "/items/uniqueItems"),
        ({"type": "array", "contains": {}}, "/contains"),
        ({**OBJECT, "if": {}}, "/if"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
        ({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}, "/$defs/x/not"),
        ({"minimum": 5}, "/minimum"),
        ({"type": "string", "maxLength": -1}, "/maxLength"),
        ({"type": "array", "items": {"type": "array", "minItems": -1}}, "/items/minItems"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "/minLength"),
        ({"type": "string", "format": "date", "pattern": "a"}, "/pattern"),
        ({"type": "string", "pattern": 'a"'}, "/pattern"),
        ({"type": "string", "pattern": 5}, "/pattern"),
        ({"type": "object", "patternProperties": {'"': {}}}, "/patternProperties"),
        ({**OBJECT, "required": ["b"]}, "/required"),
        ({**OBJECT, "patternProperties": {"b": {}}}, "/patternProperties"),
        ({**OBJECT, "propertyNames": {"pattern": "b"}}, "/propertyNames"),
        ({"type": "integer", "anyOf": [{"minimum": 1}]}, "/type"),
        ({"$ref": "#", "properties": {}}, "/properties"),
        ({"$ref": "https://example.org/x"}, "/$ref"),
        ({"type": "string", "enum": ["a", 5]}, "/enum"),
        ({"type": "integer", "const": True}, "/const"),
        ({"enum": ["a"], "type": "string", "maxLength": 3}, "/maxLength"),
        ({"allOf": [OBJECT, OBJECT]}, "/allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"oneOf": [OBJECT, OBJECT]}, "/oneOf"),
        ({"type": "array", "items": 5}, "/items"),
        ({"properties": {"a": {1: 2}}}, "/properties/a"),
    ],
)
def test_what_would_not_be_enforced_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        checked_schema(schema)
    assert caught.value.field == f"json_schema{place}"


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "T", "description": "any", "x-order": 1},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"const": 1}}, "required": ["not"]},
        {"type": ["integer", "null"], "minimum": 3},
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["number", "boolean"], "enum": [1, 2.5, True]},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "null"}}, "default": None},
        {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        {"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}]},
        {"oneOf": KINDS},
        {"oneOf": [{"$ref": "#/$defs/A~1"}, {"$ref": "#/$defs/B"}], "$defs": {"A/": KINDS[0], "B": KINDS[1]}},
        {"type": "array", "uniqueItems": False, "items": True},
    ],
)
def test_schemas_that_pass_as_they_are(schema: dict[str, Any]) -> None:
    assert checked_schema(schema) == schema


def test_what_is_made_plain_for_the_compiler() -> None:
    assert checked_schema({"type": "array", "minItems": 2}) == {"type": "array", "minItems": 2, "items": True}
    names = {"type": "object", "propertyNames": {"pattern": r"\x61"}}
    assert checked_schema(names)["propertyNames"] == {"type": "string", "pattern": r"\u0061"}
    assert names["propertyNames"] == {"pattern": r"\x61"}, "the caller's schema was changed"


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH])
def test_how_deep_a_schema_may_be(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    if depth < MAX_DEPTH:
        assert checked_schema(schema) == schema
    else:
        with pytest.raises(InvalidGrammar, match="nested more than 64 deep"):
            checked_schema(schema)
