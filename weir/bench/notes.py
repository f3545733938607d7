"""What a reader must know before believing the figures, found in the records themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weir.bench.interference import Interference
from weir.bench.record import RequestRecord
from weir.bench.workload import Workload

LATE_S = 0.05
MANY_PER_CHUNK = 1.05


def notes_on(
    records: Sequence[RequestRecord], workload: Workload, interference: Interference | None, *, ignore_eos: bool
) -> Iterator[str]:
    """One sentence for each thing that is not as asked."""
    done = [record for record in records if record.failure is None]
    if not done:
        return
    yield from _on_inputs(done)
    yield from _on_outputs(done, ignore_eos=ignore_eos)
    if interference is not None and interference.num_ended_early:
        yield (
            f"{interference.num_ended_early} of {interference.steady.num_requests} steady streams ended "
            "before the burst's last first token"
        )
    num_hits = sum(_num_unexpected_hits(record, workload) > 0 for record in done)
    if num_hits:
        yield (
            f"{num_hits} of {len(done)} prompts had more in the server's prefix cache than the "
            f"{workload.shared_prefix_tokens} tokens that they share"
        )
    late_s = max(record.sent_s - record.due_s for record in records)
    if any(record.due_s for record in records) and late_s > LATE_S:
        yield f"this client fell behind: a request was sent {late_s * 1000:.0f} ms after it was due"


def _num_unexpected_hits(record: RequestRecord, workload: Workload) -> int:
    """Tokens found in a prefix cache beside the shared prefix and what a chat's template puts before it."""
    template = max(0, record.input_tokens - record.asked_input_tokens)
    return (record.cached_tokens or 0) - workload.shared_prefix_tokens - template


def _on_inputs(done: Sequence[RequestRecord]) -> Iterator[str]:
    wrong = [record for record in done if record.input_tokens != record.asked_input_tokens]
    if wrong:
        excess = sorted({record.input_tokens - record.asked_input_tokens for record in wrong})
        by = f"{excess[0]:+d}" if len(excess) == 1 else f"{excess[0]:+d} to {excess[-1]:+d}"
        yield f"in {len(wrong)} of {len(done)} requests the server counts other prompt tokens than were made: {by}"


def _on_outputs(done: Sequence[RequestRecord], *, ignore_eos: bool) -> Iterator[str]:
    if not all(record.is_counted_by_server for record in done):
        yield "the server gives no usage: output tokens are the pieces of text that came"
    short = [record for record in done if record.output_tokens < record.asked_output_tokens]
    if short and ignore_eos:
        mean = sum(record.output_tokens for record in short) / len(short)
        yield f"{len(short)} of {len(done)} answers are shorter than asked for, {mean:.1f} tokens on average"
    num_chunks = sum(1 + len(record.itl_s) for record in done)
    per_chunk = sum(record.output_tokens for record in done) / num_chunks
    if per_chunk > MANY_PER_CHUNK:
        yield f"{per_chunk:.2f} tokens came in a piece of text, on average: a gap (ITL) is one between pieces"
