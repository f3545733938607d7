"""Logging of a process: one line a record on stderr, for people or as JSON, with the request id.

Nothing is configured at import; a process calls `setup_logging` once its configuration is known.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task works for; empty outside of any."""

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))}
"""Control characters, which clients may bring in: a record stays one line, and a terminal shows it as it is."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def setup_logging(level: str = "info", format: str = "console") -> None:
    """Send every record of this process to stderr; replaces what was set up before.

    Args:
        level: one of `LEVELS`.
        format: one of `FORMATS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in ("httpx", "httpcore", "asyncio"):  # a line for each call they make
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, request_id, the fields of `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            entry["request_id"] = request_id.get()
        entry.update(_extra(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger, message, then the fields of `extra` as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {"request_id": request_id.get()} if request_id.get() else {}
        fields.update(_extra(record))
        line = f"{_utc(record)[11:23]} {record.levelname:<7} {record.name}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in fields.items())
        line = line.translate(_ESCAPES)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _utc(record: logging.LogRecord) -> str:
    """ISO 8601 with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _extra(record: logging.LogRecord) -> Mapping[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
