"""One attempt (epoch) to bring one choice through its workers, as a state that both of them speak to.

Prefill and decode may be heard in any order, or only one of them. What decides how to go on (a denial, a failure, the
end) is kept for the pipeline, which waits for it; tokens go straight to the choice. It knows the two workers' clients
and no network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from gateway.choice_run import ChoiceRun
from gateway.in_flight import InFlightLedger
from gateway.worker_protocols import DecodeClient, OpenSequence, PrefillResult
from weir.core.errors import WeirError
from weir.core.request import FirstToken, HandoffKey, HandoffTimings, SequenceRequest, TokenDelta, TokenLogprobs
from weir.core.worker import Incarnation, WorkerInfo

if TYPE_CHECKING:
    from gateway.prefill_call import PrefillCall


class Milestone(Enum):
    """What an attempt tells as it gets there; prefill's and decode's come in any order."""

    GRANTED = "granted"
    SEALED = "sealed"
    DECODING = "decoding"
    ENDED = "ended"


class Attempt:
    """One epoch of one choice.

    Attributes:
        key: the hand-off of this attempt.
        request: what both workers are asked for.
        decode: the decode worker it is open on, or was last.
        prefill_call: the call that computes the prompt; None when the decode worker does it.
        denied_for_s: set while the decode worker's denial is not dealt with.
        error: why it failed; None for as long as it has not.

    Args:
        on_milestone: hears of each when it is reached.
        on_handoff: hears of the times of a hand-off that has ended well.
    """

    def __init__(
        self,
        choice: ChoiceRun,
        request: SequenceRequest,
        decode: WorkerInfo,
        in_flight: InFlightLedger,
        *,
        on_milestone: Callable[[Milestone], None],
        on_handoff: Callable[[HandoffTimings], None],
    ) -> None:
        self.choice = choice
        self.key: HandoffKey = choice.key
        self.request = request
        self.decode = decode
        self.prefill_call: PrefillCall | None = None
        self.denied_for_s: float | None = None
        self.error: WeirError | None = None
        self._first_index = len(choice.output_token_ids)
        self._in_flight = in_flight
        self._on_milestone = on_milestone
        self._on_handoff = on_handoff
        self._sequence: OpenSequence | None = None
        self._num_booked_blocks = 0
        self._is_granted = False
        self._is_sealed = False
        self._is_decoding = False
        self._is_hold_over = False
        self._is_closed = False
        self._decided = asyncio.Event()
        self._book(decode)

    @property
    def is_unbound(self) -> bool:
        """Whether no decode worker looks after its hold on the prefill worker yet."""
        return not (self._is_granted or self._is_closed)

    @property
    def is_hold_over(self) -> bool:
        """Whether the prefill worker is known to hold nothing for it any more."""
        return self._is_hold_over

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was closed, or its choice has ended."""
        return self._is_closed or self.error is not None or self.choice.is_ended

    @property
    def is_waiting_for_prefill(self) -> bool:
        """Whether nothing was heard of its prompt's computation yet."""
        return self.prefill_call is not None and not (self._is_sealed or self._is_decoding)

    @property
    def suspects(self) -> set[Incarnation]:
        """The workers that may be at fault for `error`, by the hop that it names."""
        hop = None if self.error is None else self.error.hop
        if hop in ("prefill", "transfer"):
            return set() if self.prefill_call is None else {self.prefill_call.worker.incarnation}
        return {self.decode.incarnation} if hop == "decode" else set()

    def open(self, client: DecodeClient) -> None:
        """Ask a decode worker for the sequence; what comes of it, also that there is no session, is heard later."""
        self.denied_for_s = None
        self._leave_decode()
        self._book(client.info)
        source = None if self.prefill_call is None else self.prefill_call.worker
        try:
            self._sequence = client.open(self.request, self.key, source=source, listener=self)
        except WeirError as error:
            self.on_failed(error)

    async def wait_for_decision(self, *, timeout_s: float | None = None) -> None:
        """Return once it was denied, has failed, was closed, or its choice has ended; or when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._decided.wait()
                self._decided.clear()
        except TimeoutError:
            pass

    def close(self) -> None:
        """End it on both workers; nothing is heard from it any more. Never waits; again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._leave_decode()
        if self.prefill_call is not None:
            self.prefill_call.leave(self)
        self._decided.set()

    # What the decode worker says (`worker_protocols.DecodeListener`).

    def on_granted(self) -> None:
        if not self._is_closed:
            self._is_granted = True
            self._on_milestone(Milestone.GRANTED)

    def on_denied(self, retry_after_s: float) -> None:
        if not self._is_closed:
            self._leave_decode()
            self.denied_for_s = retry_after_s
            self._decided.set()

    def on_delta(
        self, delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...], timings: HandoffTimings | None
    ) -> None:
        if self._is_closed:
            return
        if not self._is_decoding:
            self._is_granted = self._is_decoding = self._is_hold_over = True
            self._on_milestone(Milestone.DECODING)
        if timings is not None:
            self._on_handoff(timings)
        self._accept(delta, prompt_logprobs)

    def on_failed(self, error: WeirError) -> None:
        if not self._is_closed and self.error is None:
            error.hop = error.hop or "decode"
            self.error = error
            self._decided.set()

    # What the prefill worker says.

    def on_first_token(self, token: FirstToken, result: PrefillResult) -> None:
        """The prompt is computed; the client has its first token before the last of the KV has moved."""
        if self._is_closed:
            return
        self._is_sealed = True
        self._is_hold_over = self._is_hold_over or token.finish_reason is not None
        self._on_milestone(Milestone.SEALED)
        delta = TokenDelta(
            first_index=self._first_index,
            token_ids=(token.token_id,),
            logprobs=() if token.logprobs is None else (token.logprobs,),
            finish_reason=token.finish_reason,
            stop_token_id=token.stop_token_id,
            num_cached_tokens=result.num_cached_tokens,
        )
        self._accept(delta, result.prompt_logprobs)

    def on_prefill_failed(self, error: WeirError) -> None:
        """Of no matter once the decode worker has the KV."""
        if not self._is_decoding:
            error.hop = error.hop or "prefill"
            self.on_failed(error)

    def _accept(self, delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        if self.choice.is_ended:
            return
        try:
            self.choice.accept(delta, prompt_logprobs)
        except WeirError as error:
            self.on_failed(error)
            return
        if self.choice.is_ended:
            self._on_milestone(Milestone.ENDED)
            self._decided.set()

    def _book(self, worker: WorkerInfo) -> None:
        """Count the sequence as the worker's from the moment it is meant for it, so that a burst spreads."""
        self.decode = worker
        self._num_booked_blocks = worker.layout.blocks_for(self.request.num_known_tokens)
        self._in_flight.add(worker.incarnation, num_sequences=1, num_blocks=self._num_booked_blocks)

    def _leave_decode(self) -> None:
        if self._sequence is not None:
            self._sequence.cancel()
            self._sequence = None
        if self._num_booked_blocks:
            self._in_flight.add(self.decode.incarnation, num_sequences=-1, num_blocks=-self._num_booked_blocks)
            self._num_booked_blocks = 0
