"""Stop strings in text that arrives in pieces: nothing of a stop string is ever let through."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    The match is the one that *ends* first (of several that end together, the longest), so that it depends on the text
    alone and not on the borders of the pieces. A tail that could still grow into a stop string is held back.

    Args:
        stops: the strings to look for; none of them empty.
        include_in_output: whether the matched string is let through, as the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_in_output = include_in_output
        self._beginnings = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._first_letters = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, or None."""

    def push(self, text: str) -> str:
        """Take the next piece; gives the text that may be shown now. Once ``matched`` is set, no more may be pushed."""
        assert self.matched is None, "the text has already ended at a stop string"
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_in_output else start]
        cut = len(text) - self._held_length(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text still held back; for when the request ends without a match."""
        text, self._held = self._held, ""
        return text

    def _held_length(self, text: str) -> int:
        longest = min(len(text), self._longest_beginning)
        if not longest or self._first_letters.isdisjoint(text[-longest:]):
            return 0
        return next((size for size in range(longest, 0, -1) if text[-size:] in self._beginnings), 0)
