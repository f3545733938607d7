"""A section for `benchmarks.gpu_section`: its second part raises, its third ends the process."""

from __future__ import annotations

import os
from collections.abc import Iterator

from benchmarks.gpu_record import Row
from benchmarks.gpu_section import Begun, Message, Situation


def measure(situation: Situation) -> Iterator[Message]:
    for name in ("one", "two", "three", "four"):
        if name in situation.done:
            continue
        yield Begun(name)
        if name == "two":
            raise ValueError("no such\nthing")
        if name == "three":
            os._exit(7)
        yield Row(section="failing", name=name, figure=1.0)
