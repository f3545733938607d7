"""Tokens of one choice to what a client sees: text, log-probabilities, finish reason, counts.

The pipeline speaks in token ids; stop strings and text exist only here. Used by the HTTP and the gRPC front end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from weir.core.request import FinishReason, TokenDelta, TokenLogprobs
from weir.text.detokenizer import Detokenizer
from weir.text.stop_strings import StopMatcher, StopStrings
from weir.text.tokenizer import Tokenizer

StopReason = str | int | None
"""The stop string or the stop token id that ended a choice; None for the model's own end of sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFormat:
    """How the tokens of a request's choices become text.

    Attributes:
        stops: stop strings; a choice ends with the token that completes one.
        include_stop: leave what stopped the choice (string or token) in the text.
        min_tokens: a stop string that is complete before so many tokens is plain text.
        with_tokens: also give each token by itself, for log-probabilities and token ids.
        eos_token_ids: ids that are no stop reason worth naming.
    """

    tokenizer: Tokenizer
    stops: StopStrings | None = None
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    with_tokens: bool = False
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceToken:
    """One output token.

    Attributes:
        text_offset: characters of this choice's output before the token.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What one step adds to a choice.

    Attributes:
        index: of the choice among all of the request's.
        text: whole characters that can't belong to a stop string any more.
        tokens: the tokens whose text has left with this delta or before; empty unless asked for.
        finish_reason: set on the last delta: stop, length or abort.
    """

    index: int
    text: str
    tokens: tuple[ChoiceToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: StopReason = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell a client."""
        return not (self.text or self.tokens or self.finish_reason)


class ChoiceAssembler:
    """Takes the deltas of one choice in order.

    Args:
        index: which of the request's choices this is.

    Attributes:
        num_tokens: output tokens that count: up to the one that completed a stop string.
        num_cached_tokens: prompt tokens that came from a prefix cache.
        finish_reason: None while the choice runs.
    """

    __slots__ = (
        "_decoded", "_detokenizer", "_emitted", "_format",
        "_index", "_matcher", "_pending", "_takes_each",
        "finish_reason", "num_cached_tokens", "num_tokens", "stop_reason",
    )  # fmt: skip

    def __init__(self, choice_format: ChoiceFormat, index: int = 0) -> None:
        self._index = index
        self._format = choice_format
        self._detokenizer = Detokenizer(choice_format.tokenizer, skip_special_tokens=choice_format.skip_special_tokens)
        self._matcher: StopMatcher | None = choice_format.stops.matcher() if choice_format.stops else None
        self._takes_each = self._matcher is not None or choice_format.with_tokens
        self._pending: deque[tuple[int, ChoiceToken]] = deque()
        self._decoded = 0
        self._emitted = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: StopReason = None

    def push(self, delta: TokenDelta) -> ChoiceDelta:
        """What these tokens add. Repeated tokens are dropped, and so is all that follows a stop string."""
        if self.finish_reason is not None:
            return ChoiceDelta(index=self._index, text="")
        if delta.num_cached_tokens and not self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        token_ids, logprobs = delta.token_ids, delta.logprobs
        num_repeated = self.num_tokens - delta.first_index
        assert num_repeated >= 0, f"tokens {self.num_tokens} to {delta.first_index} of a choice were lost"
        if num_repeated:
            token_ids, logprobs = token_ids[num_repeated:], logprobs[num_repeated:]
        text = self._push_each(delta, token_ids, logprobs) if self._takes_each else self._push_all(delta, token_ids)
        if delta.finish_reason is not None and self.finish_reason is None:
            text += self._finish(delta, delta.finish_reason)
        self._emitted += len(text)
        tokens = self._release_tokens() if self._pending else ()
        return ChoiceDelta(
            index=self._index,
            text=text,
            tokens=tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _push_all(self, delta: TokenDelta, token_ids: tuple[int, ...]) -> str:
        self.num_tokens += len(token_ids)
        if delta.stop_token_id is not None and not self._format.include_stop:
            token_ids = token_ids[:-1]
        return self._detokenizer.push(token_ids)

    def _push_each(self, delta: TokenDelta, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> str:
        last = len(token_ids) - 1
        hides_last = delta.stop_token_id is not None and not self._format.include_stop
        texts: list[str] = []
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            is_hidden = hides_last and position == last
            text = "" if is_hidden else self._detokenizer.push_one(token_id)
            if self._format.with_tokens:
                token = ChoiceToken(
                    token_id=token_id,
                    text_offset=self._decoded,
                    logprobs=logprobs[position] if logprobs else None,
                )
                self._decoded += len(text)
                self._pending.append((self._decoded, token))
            texts.append(self._match(text))
            if self.finish_reason is not None:
                break
        return "".join(texts)

    def _match(self, text: str) -> str:
        """The part of `text`, and of what was held back, that may leave; ends the choice at a stop string."""
        if self._matcher is None or not text:
            return text
        match = self._matcher.push(text, may_stop=self.num_tokens >= self._format.min_tokens)
        if match.stop is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = match.stop
        return match.text

    def _finish(self, delta: TokenDelta, reason: FinishReason) -> str:
        """The end as the engine saw it. A character that a length limit cut in two is left out."""
        text = "" if reason is FinishReason.LENGTH else self._match(self._detokenizer.flush())
        if self._matcher is not None and self.finish_reason is None:
            text += self._matcher.flush()
        if self.finish_reason is None:
            self.finish_reason = reason.value
            if delta.stop_token_id not in self._format.eos_token_ids:
                self.stop_reason = delta.stop_token_id
        return text

    def _release_tokens(self) -> tuple[ChoiceToken, ...]:
        """A token leaves with the text that it completes, and with the end."""
        pending = self._pending
        released: list[ChoiceToken] = []
        while pending and (pending[0][0] <= self._emitted or self.finish_reason is not None):
            released.append(pending.popleft()[1])
        return tuple(released)
