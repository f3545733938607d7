"""What is known of one request afterwards, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from weir.bench.failure import UNFINISHED, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times in seconds; `due_s` and `sent_s` from the start of the run, the others from `sent_s`.

    Attributes:
        kind: main; in a run with a burst steady or burst.
        sent_s: when the last byte of the request was handed to the system, over a connection that was open by then.
        ttft_s: until the first text.
        itl_s: every gap between two pieces of text.
        e2el_s: until the end of the answer, whole or not.
        input_tokens, output_tokens: the server's counts; where it has none the number asked for and the pieces of text.
        cached_tokens: of the prompt, from the server's prefix cache, where it says so.
        failure: why it has no whole answer, or None.
    """

    run: str
    kind: str
    index: int
    due_s: float
    sent_s: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2el_s: float
    asked_input_tokens: int
    asked_output_tokens: int
    input_tokens: int
    output_tokens: int
    is_counted_by_server: bool
    cached_tokens: int | None
    failure: Failure | None

    @property
    def is_finished(self) -> bool:
        return self.failure is None or self.failure.kind != UNFINISHED

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for one token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def ended_s(self) -> float:
        """From the start of the run."""
        return self.sent_s + self.e2el_s

    @property
    def first_text_s(self) -> float | None:
        """From the start of the run."""
        return None if self.ttft_s is None else self.sent_s + self.ttft_s

    def gaps_between(self, start_s: float, end_s: float) -> list[float]:
        """The gaps that overlap the time from `start_s` to `end_s`, which count from the start of the run."""
        if self.first_text_s is None:
            return []
        begins = accumulate(self.itl_s, initial=self.first_text_s)
        return [gap for begin, gap in zip(begins, self.itl_s, strict=False) if begin < end_s and begin + gap > start_s]
