"""One choice of a prompt, over as many attempts as it takes: what the client has of it, and so what may still be sent.

It knows no worker: attempts tell it what they hear, in whatever order their workers speak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.generation_stream import ChoiceNews, GenerationStream
from weir.core.errors import TransferProtocolError
from weir.core.request import FinishReason, HandoffId, HandoffKey, TokenDelta, TokenLogprobs
from weir.core.worker import Incarnation


class ChoiceRun:
    """The client's side of one choice.

    Attributes:
        epoch: of the newest attempt; -1 before the first.
        output_token_ids: every token that was sent.
        avoid: workers that failed this choice.
        has_prompt_logprobs: whether they were sent; later attempts need not compute them again.
    """

    def __init__(
        self,
        choice_index: int,
        handoff_id: HandoffId,
        stream: GenerationStream,
        *,
        on_tokens: Callable[[int, int], None],
    ) -> None:
        self.choice_index = choice_index
        self.handoff_id = handoff_id
        self.epoch = -1
        self.output_token_ids: list[int] = []
        self.avoid: set[Incarnation] = set()
        self.has_prompt_logprobs = False
        self._stream = stream
        self._on_tokens = on_tokens
        self._num_cached_tokens: int | None = None
        self._finish_reason: FinishReason | None = None
        self._is_ended = False

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix hit gave, as the first attempt said; 0 until one has."""
        return self._num_cached_tokens or 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None for as long as it has not."""
        return self._finish_reason

    @property
    def is_ended(self) -> bool:
        """Whether its last token was sent, or the reader wants no more."""
        return self._is_ended

    @property
    def key(self) -> HandoffKey:
        """Names the newest attempt."""
        return HandoffKey(self.handoff_id, self.epoch)

    def accept(self, delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Send what the client does not have yet; the prompt's figures stay those that were heard first.

        Raises:
            TransferProtocolError: the delta leaves tokens out, or repeats others than those that were sent.
            RequestCancelledError: too much waits for the reader.
        """
        if self._is_ended:
            return
        delta = self._new_part(delta)
        if self.has_prompt_logprobs:
            prompt_logprobs = ()
        if not (delta.token_ids or prompt_logprobs or delta.finish_reason is not None):
            return
        self.has_prompt_logprobs = self.has_prompt_logprobs or bool(prompt_logprobs)
        self.output_token_ids.extend(delta.token_ids)
        self._finish_reason = delta.finish_reason
        self._is_ended = delta.finish_reason is not None
        self._on_tokens(self.choice_index, len(delta.token_ids))
        self._stream.put(ChoiceNews(choice_index=self.choice_index, delta=delta, prompt_logprobs=prompt_logprobs))

    def finish(self) -> None:
        """The reader wants no more: a stop string ended it."""
        self._finish_reason = FinishReason.STOP
        self._is_ended = True

    def _new_part(self, delta: TokenDelta) -> TokenDelta:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        num_sent = len(self.output_token_ids)
        num_repeated = num_sent - delta.first_index
        if num_repeated == 0 and delta.num_cached_tokens == self._num_cached_tokens:
            return delta
        if num_repeated < 0:
            raise TransferProtocolError(
                f"the worker's tokens go on at {delta.first_index}; {num_sent} were sent", hop="decode"
            )
        repeated = list(delta.token_ids[:num_repeated])
        if repeated != self.output_token_ids[delta.first_index : delta.first_index + len(repeated)]:
            raise TransferProtocolError(
                f"the worker repeats other tokens from {delta.first_index} on than those that were sent", hop="decode"
            )
        return replace(
            delta,
            first_index=num_sent,
            token_ids=delta.token_ids[num_repeated:],
            logprobs=delta.logprobs[num_repeated:],
            num_cached_tokens=self._num_cached_tokens,
        )
