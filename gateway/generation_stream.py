"""What a reader gets of one prompt: the new tokens of its choices, coalesced while nobody reads.

The buffer between the session with the decode workers, which never waits for one client, and a client that may be
slow. It knows tokens and choices, neither workers nor hand-offs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from weir.core.errors import RequestCancelledError, WeirError
from weir.core.request import TokenDelta, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceNews:
    """New tokens of one choice of a prompt.

    Attributes:
        delta: never repeats a token of an earlier one; the one with a finish reason is the choice's last.
        prompt_logprobs: with the first news of each choice, if asked for: for prompt positions 1 and up.
    """

    choice_index: int
    delta: TokenDelta
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class GenerationStream:
    """One writer, the pipeline; one reader, who renders the answer.

    Args:
        max_buffered_tokens: tokens that may wait for the reader; with more it is taken to be gone.
        on_finish: called when the reader ends a choice itself.
    """

    def __init__(self, num_choices: int, *, max_buffered_tokens: int, on_finish: Callable[[int], None]) -> None:
        self._max_buffered_tokens = max_buffered_tokens
        self._on_finish = on_finish
        self._open_choices = set(range(num_choices))
        self._pending: dict[int, list[ChoiceNews]] = {}
        self._num_buffered_tokens = 0
        self._error: WeirError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def error(self) -> WeirError | None:
        """Why it ended before its choices did; None for as long as it has not."""
        return self._error

    async def read(self) -> tuple[ChoiceNews, ...]:
        """At least one news, at most one a choice; () once every choice has ended.

        Raises:
            WeirError: the rest will not come; what came before has been read.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open_choices:
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        self._num_buffered_tokens = 0
        return tuple(_merge(news) for news in pending.values())

    def finish_choice(self, choice_index: int) -> None:
        """The reader wants no more of a choice (a stop string ended it): its work is cancelled on both workers."""
        if choice_index in self._open_choices:
            self._open_choices.discard(choice_index)
            for dropped in self._pending.pop(choice_index, ()):
                self._num_buffered_tokens -= len(dropped.delta.token_ids)
            self._wake_reader()
            self._on_finish(choice_index)

    def put(self, news: ChoiceNews) -> None:
        """Add news of a choice; dropped after the choice, or all of it, has ended.

        Raises:
            RequestCancelledError: too much waits for the reader.
        """
        if self._error is not None or news.choice_index not in self._open_choices:
            return
        self._num_buffered_tokens += len(news.delta.token_ids)
        if self._num_buffered_tokens > self._max_buffered_tokens:
            raise RequestCancelledError(
                f"the client left {self._num_buffered_tokens} tokens unread; at most {self._max_buffered_tokens} wait",
                hop="gateway",
            )
        if news.delta.finish_reason is not None:
            self._open_choices.discard(news.choice_index)
        self._pending.setdefault(news.choice_index, []).append(news)
        self._wake_reader()

    def fail(self, error: WeirError) -> None:
        """Nothing more will come; the first error counts, and none after every choice has ended."""
        if self._error is None and self._open_choices:
            self._error = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(news: Sequence[ChoiceNews]) -> ChoiceNews:
    """One news that says what all of a choice's say."""
    if len(news) == 1:
        return news[0]
    first, last = news[0].delta, news[-1].delta
    return ChoiceNews(
        choice_index=news[0].choice_index,
        delta=TokenDelta(
            first_index=first.first_index,
            token_ids=tuple(chain.from_iterable(each.delta.token_ids for each in news)),
            logprobs=tuple(chain.from_iterable(each.delta.logprobs for each in news)),
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            num_cached_tokens=last.num_cached_tokens,
        ),
        prompt_logprobs=tuple(chain.from_iterable(each.prompt_logprobs for each in news)),
    )
