"""A section for `benchmarks.gpu_section` that says what it turns to and never more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from benchmarks.gpu_section import Begun, Message, Situation


def measure(situation: Situation) -> Iterator[Message]:
    yield Begun("endless")
    threading.Event().wait()
