"""The engine's steps on a mixture of experts; a step reads the experts that even routing would meet."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_engine import measure_model
from benchmarks.gpu_section import Message, Situation
from benchmarks.random_model import QWEN_3_30B_A3B

SECTION = "experts"


def measure(situation: Situation) -> Iterator[Message]:
    yield from measure_model("qwen3-30b-a3b-12-layers", QWEN_3_30B_A3B, situation, SECTION)
