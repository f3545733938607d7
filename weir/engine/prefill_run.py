"""From the engine to whoever waits for one prefill: how far it is, and at the end the first tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weir.core.errors import WeirError
from weir.core.request import FirstToken, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """How far a prefill is.

    Attributes:
        num_computed_tokens: tokens whose KV is in place, cached ones included.
        block_ids: the whole block table; blocks up to `num_computed_tokens` may be read.
        first_tokens: one for each choice, in the order of the choices; set on the last progress.
        prompt_logprobs: for prompt positions 1 and up, on the last progress, when asked for.
        queue_s, prefill_s: from arrival to admission, and from there to this progress.
    """

    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    queue_s: float
    prefill_s: float


class PrefillRun:
    """Iterates over the progress of one prefill; a slow reader sees only the newest. Used on the event loop only.

    Close it (`contextlib.aclosing`): closing it early, or cancelling a wait for its progress, ends the computation at
    the next step. The holds of its choices stay either way.

    Args:
        on_close: called once, when the reader leaves before the end.
    """

    def __init__(self, on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._newest: PrefillProgress | None = None
        self._error: WeirError | None = None
        self._has_news = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> PrefillRun:
        return self

    async def __anext__(self) -> PrefillProgress:
        """The newest progress that was not seen yet.

        Raises:
            WeirError: the prefill failed, was aborted, or its deadline passed.
        """
        if self._is_over:
            raise StopAsyncIteration
        try:
            await self._has_news.wait()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._has_news.clear()
        if self._error is not None:
            self._is_over = True
            raise self._error
        progress, self._newest = self._newest, None
        if progress is None:  # closed by another task meanwhile
            raise StopAsyncIteration
        self._is_over = self._is_over or progress.first_tokens is not None
        return progress

    async def aclose(self) -> None:
        """Stop caring. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._newest = None
            self._has_news.set()
            self._on_close()

    def put(self, news: PrefillProgress | WeirError) -> None:
        """Called by the engine, on the loop."""
        if self._is_over:
            return
        if isinstance(news, WeirError):
            self._error = news
        else:
            self._newest = news
        self._has_news.set()
