"""From the engine to one reader on the event loop: news of many sequences, merged while nobody reads.

So a reader that falls behind costs memory for its tokens and nothing else: no step waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weir.core.errors import WeirError
from weir.core.request import TokenDelta, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceNews:
    """What is new of one sequence. A delta with a finish reason, or an error, is its last.

    Attributes:
        prompt_logprobs: for prompt positions 1 and up, all of them with the first delta, when asked for.
    """

    sequence_id: str
    delta: TokenDelta | None = None
    error: WeirError | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.error is not None or (self.delta is not None and self.delta.finish_reason is not None)


class TokenStream:
    """One reader's end. Used on the event loop only.

    Args:
        on_close: called once when the reader closes; ends the sequences that still write here.
    """

    def __init__(self, on_close: Callable[[TokenStream], None]) -> None:
        self._on_close = on_close
        self._pending: dict[str, list[SequenceNews]] = {}
        self._has_news = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def read(self) -> tuple[SequenceNews, ...]:
        """Everything new, one value a sequence, in the order in which they first had news; at least one.

        Waits while there is none. Empty once the stream is closed.
        """
        while not self._pending and not self._is_closed:
            self._has_news.clear()
            await self._has_news.wait()
        pending, self._pending = self._pending, {}
        return tuple(map(_merge, pending.values()))

    def close(self) -> None:
        """End every sequence that writes here and drop what was not read. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._pending.clear()
            self._has_news.set()
            self._on_close(self)

    def put(self, news: SequenceNews) -> None:
        """Called by the engine, on the loop."""
        if not self._is_closed:
            self._pending.setdefault(news.sequence_id, []).append(news)
            self._has_news.set()

    def forget(self, sequence_id: str) -> None:
        """Drop what was not read of a sequence that was aborted."""
        self._pending.pop(sequence_id, None)


def _merge(news: list[SequenceNews]) -> SequenceNews:
    if len(news) == 1:
        return news[0]
    deltas = [item.delta for item in news if item.delta is not None]
    return SequenceNews(
        sequence_id=news[0].sequence_id,
        delta=_merge_deltas(deltas) if deltas else None,
        error=news[-1].error,
        prompt_logprobs=tuple(logprobs for item in news for logprobs in item.prompt_logprobs),
    )


def _merge_deltas(deltas: list[TokenDelta]) -> TokenDelta:
    last = deltas[-1]
    return TokenDelta(
        first_index=deltas[0].first_index,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        num_cached_tokens=last.num_cached_tokens,
    )
