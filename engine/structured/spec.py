"""What a constrained request asks for, checked when it is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from ...fsm.errors import TwoStrokeError

MAX_SPEC_BYTES = 65_536


class InvalidGrammar(TwoStrokeError, ValueError):
    """A grammar that cannot be used; ``field`` names the part of the specification, ``reason`` what is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {reason}")


class StructuredOutputMissing(TwoStrokeError, ImportError):
    """The library that compiles grammars is not installed."""


def _strings(value: Iterable[str] | None) -> tuple[str, ...] | None:
    """Never raises: what is no list stays as it is, and the check names the field."""
    return tuple(value) if isinstance(value, list | tuple) else value  # pyright: ignore[reportReturnType]


@frozen(kw_only=True)
class GrammarSpec:
    """What the text of a request must be; give exactly one field. All of the text matches, from its first character on.

    Args:
        json_object: any JSON object.
        json_schema: JSON that this schema accepts, with properties in the schema's order. Objects hold what the schema
            names and no more, unless it says ``additionalProperties``.
        regex: text that the expression matches as a whole.
        choice: one of these texts.
        grammar: an EBNF grammar in GBNF syntax; the text is its ``root``.

    Raises:
        InvalidGrammar: none or several fields, a value of another type, or one above 64 KiB.
    """

    json_object: bool = False
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = field(default=None, converter=_strings)
    grammar: str | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.json_object, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidGrammar("json_object", f"must be true or false, got {self.json_object!r:.80}")
        given = [name for name in _FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidGrammar(given[1] if given else "grammar", f"give one of {', '.join(_FIELDS)}; got {found}")
        name = given[0]
        value = getattr(self, name)
        if name == "json_schema" and not isinstance(value, Mapping):
            raise InvalidGrammar(name, f"must be a JSON object, got {value!r:.80}")
        if name in ("regex", "grammar") and not isinstance(value, str):
            raise InvalidGrammar(name, f"must be a string, got {value!r:.80}")
        if name == "choice":
            _check_choice(value)
        size = len(_encoded(name, self.text))
        if size > MAX_SPEC_BYTES:
            raise InvalidGrammar(name, f"has {size} bytes; at most {MAX_SPEC_BYTES} are compiled")

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(name for name in _FIELDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The value of that field as one string; equal specifications have equal ones."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidGrammar(self.kind, f"is no JSON: {error}") from error


_FIELDS = ("json_object", "json_schema", "regex", "choice", "grammar")


def _check_choice(value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise InvalidGrammar("choice", f"must be a list of strings, got {value!r:.80}")
    if not value or not all(value):
        raise InvalidGrammar("choice", "holds an empty text" if value else "is empty: there is nothing to choose from")


def _encoded(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidGrammar(name, f"must hold whole characters ({error})") from error
