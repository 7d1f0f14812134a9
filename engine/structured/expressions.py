"""Regular expressions as the compiler reads them, less what it would misread without saying so."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .spec import InvalidGrammar

_PIECE = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL)
_CONTROLS = {"\\n", "\\t", "\\r", "\\f", "\\v", "\\0"}


def checked_expression(field: str, text: str) -> str:
    r"""A regular expression to be matched as a whole.

    ``\xNN`` is spelled ``\u00NN``, because the compiler reads more than two digits.

    Raises:
        InvalidGrammar: ``^`` or ``$`` anywhere but at the ends of an alternative: the compiler ignores them there.
    """
    pieces = list(_pieces(text))
    depth = 0
    for index, (piece, in_class) in enumerate(pieces):
        if in_class:
            continue
        depth += (piece == "(") - (piece == ")")
        before = pieces[index - 1][0] if index else "|"
        after = pieces[index + 1][0] if index + 1 < len(pieces) else "|"
        if (piece == "^" and (depth or before != "|")) or (piece == "$" and (depth or after != "|")):
            raise InvalidGrammar(
                field, f"{piece!r} inside of an expression is not supported; the whole text has to match, so drop it"
            )
    return "".join(f"\\u00{piece[2:]}" if piece.startswith("\\x") else piece for piece, _ in pieces)


def checked_pattern(field: str, text: str) -> str:
    """A ``pattern`` of a JSON schema, to be matched by the inside of a JSON string.

    Raises:
        InvalidGrammar: it names characters that JSON writes with a backslash, where the compiler would not.
    """
    checked = checked_expression(field, text)
    for piece, _ in _pieces(checked):
        code = int(piece[2:], 16) if piece.startswith("\\u") else ord(piece[-1])
        if code < 0x20 or code in (0x22, 0x5C) or piece in _CONTROLS:
            raise InvalidGrammar(
                field,
                f"{piece!r} is not supported in a pattern: quotes, backslashes and control characters have to be "
                "escaped in JSON; leave them out of the pattern, or use a grammar",
            )
    return checked


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Characters and escapes, each with whether it is inside of a character class."""
    in_class = False
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece == "]":
            in_class = False
        yield piece, in_class
        if piece == "[":
            in_class = True
