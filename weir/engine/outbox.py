"""What has happened to sequences, in order, until it is delivered to their readers. It changes no sequence's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weir.core.deadline import Clock
from weir.core.errors import WeirError
from weir.core.request import FirstToken, TokenDelta
from weir.engine.prefill_run import PrefillProgress
from weir.engine.sampler import SampledToken
from weir.engine.sequence import Sequence, TokenEnd
from weir.engine.token_stream import SequenceNews

News = SequenceNews | PrefillProgress | WeirError
Deliver = Callable[[list[tuple[Any, News]]], None]
"""Takes pairs of a sequence's reader and its news, in order. A prefill's error is its news."""


class Outbox:
    """News of one engine.

    Args:
        deliver: takes them; called by the engine's own thread.
        clock: the engine's.
    """

    def __init__(self, deliver: Deliver, clock: Clock) -> None:
        self._deliver = deliver
        self._clock = clock
        self._news: list[tuple[Any, News]] = []

    def flush(self) -> None:
        """Deliver what is here."""
        if self._news:
            news, self._news = self._news, []
            self._deliver(news)

    def put_token(self, sequence: Sequence, token: SampledToken, end: TokenEnd) -> None:
        """The token just appended, with the prompt's log-probabilities that nobody has heard yet."""
        delta = TokenDelta(
            first_index=sequence.num_output_tokens - 1,
            token_ids=(token.token_id,),
            logprobs=() if token.logprobs is None else (token.logprobs,),
            finish_reason=end.finish_reason,
            stop_token_id=end.stop_token_id,
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )
        news = SequenceNews(
            sequence_id=sequence.sequence_id, delta=delta, prompt_logprobs=tuple(sequence.prompt_logprobs)
        )
        sequence.prompt_logprobs = []
        self._news.append((sequence.reader, news))

    def put_progress(self, sequence: Sequence) -> None:
        """How far a prefill is."""
        self._news.append((sequence.reader, self._progress(sequence, None)))

    def put_first_tokens(self, sequence: Sequence, tokens: tuple[SampledToken, ...]) -> None:
        """A prefill is over: one token for each of its choices."""
        first_tokens: list[FirstToken] = []
        for choice, token in zip(sequence.choices, tokens, strict=True):
            end = sequence.end_of(token.token_id)
            first_tokens.append(
                FirstToken(
                    choice_index=choice.choice_index,
                    token_id=token.token_id,
                    logprobs=token.logprobs,
                    finish_reason=end.finish_reason,
                    stop_token_id=end.stop_token_id,
                )
            )
        self._news.append((sequence.reader, self._progress(sequence, tuple(first_tokens))))

    def put_error(self, sequence: Sequence, error: WeirError) -> None:
        if sequence.is_prefill_only:
            self._news.append((sequence.reader, error))
        else:
            self._news.append((sequence.reader, SequenceNews(sequence_id=sequence.sequence_id, error=error)))

    def _progress(self, sequence: Sequence, first_tokens: tuple[FirstToken, ...] | None) -> PrefillProgress:
        admitted_s = sequence.admitted_s or sequence.arrived_s
        return PrefillProgress(
            num_computed_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            block_ids=tuple(sequence.block_ids),
            first_tokens=first_tokens,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first_tokens is not None else (),
            queue_s=admitted_s - sequence.arrived_s,
            prefill_s=self._clock() - admitted_s,
        )
