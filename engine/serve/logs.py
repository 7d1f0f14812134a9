"""Log lines: one JSON object each, or text."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

OWN_LOGGER, SERVER_LOGGER = "twostroke", "uvicorn"
FACTS = "facts"
"""The attribute of a log record that holds its named values."""


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``logger``, ``message``, then the record's own facts (``request_id`` …), then the error."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same on a line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={_on_one_line(value)}" for name, value in getattr(record, FACTS, {}).items())
        return f"{super().formatMessage(record)} {facts}".rstrip()


def _on_one_line(value: object) -> str:
    """A client chooses paths and ids: none of them may begin a line of its own."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def set_up_logging(style: Literal["json", "text"], level: str = "INFO") -> None:
    """Send the lines of this package and of uvicorn to standard error. For programs, not for libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name, least in ((OWN_LOGGER, level), (SERVER_LOGGER, "DEBUG" if level == "DEBUG" else "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
