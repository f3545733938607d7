"""Records as a run would have left them."""

from __future__ import annotations

from typing import Any

from weir.bench.failure import Failure
from weir.bench.record import RequestRecord


def record(*, failed: str | None = None, **fields: Any) -> RequestRecord:
    """A request of 10 tokens in and 5 out: first text after 1 s, then four gaps of 0.25 s; `fields` replace parts."""
    return RequestRecord(
        **{
            "run": "main",
            "kind": "main",
            "index": 0,
            "due_s": 0.0,
            "sent_s": 0.0,
            "ttft_s": 1.0,
            "itl_s": (0.25, 0.25, 0.25, 0.25),
            "e2el_s": 2.0,
            "asked_input_tokens": 10,
            "asked_output_tokens": 5,
            "input_tokens": 10,
            "output_tokens": 5,
            "is_counted_by_server": True,
            "cached_tokens": None,
            "failure": Failure(kind=failed, message="why") if failed is not None else None,
            **fields,
        }
    )
