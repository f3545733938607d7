from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from weir.runtime.logs import ConsoleFormatter, JsonFormatter, request_id

ROOT = Path(__file__).resolve().parents[2]


def _record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    record = logging.getLogger("weir.test").makeRecord(
        "weir.test", logging.INFO, "file.py", 1, message, args, None, extra=extra or None
    )
    record.created, record.msecs = 1_700_000_000.25, 250.0
    return record


def test_json_carries_request_id_and_extra() -> None:
    token = request_id.set("req-1")
    try:
        entry = json.loads(JsonFormatter().format(_record("done in %d ms", 7, num_tokens=3, path=Path("/x"))))
    finally:
        request_id.reset(token)
    assert entry == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "weir.test",
        "message": "done in 7 ms",
        "request_id": "req-1",
        "num_tokens": 3,
        "path": "/x",
    }


def test_json_outside_of_a_request_has_no_request_id() -> None:
    assert "request_id" not in json.loads(JsonFormatter().format(_record("idle")))


def test_an_exception_stays_one_json_line() -> None:
    try:
        raise ValueError("lost\nline")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: lost" in json.loads(line)["exception"]


def test_console_line_is_for_people() -> None:
    line = ConsoleFormatter().format(_record("ready", port=8000))
    assert line == "22:13:20.250 INFO    weir.test: ready port=8000"


def test_setup_sends_records_of_the_level_to_stderr_alone() -> None:
    script = (
        "import logging, warnings; from weir.runtime.logs import setup_logging; setup_logging('warning', 'json');"
        "logging.getLogger('a').info('quiet'); logging.getLogger('a').warning('loud'); warnings.warn('old')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == ""
    assert entries[0]["message"] == "loud"
    assert "old" in entries[1]["message"]
    assert len(entries) == 2


def test_what_clients_bring_in_stays_on_its_line() -> None:
    line = ConsoleFormatter().format(_record("ended", label="a\n07:44:14 ERROR fake\x1b[31m"))
    assert line.endswith(r"label=a\x0a07:44:14 ERROR fake\x1b[31m")
