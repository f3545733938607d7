"""One prompt computed on a prefill worker for the attempts that share it, until its holds are somebody else's care.

It tells the attempts what comes of the call, keeps the holds of those that no decode worker is bound to alive, and
ends what no attempt wants any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.attempt import Attempt
from gateway.in_flight import InFlightLedger
from gateway.worker_protocols import PrefillChoice, PrefillClient, PrefillResult
from weir.core.errors import HandoffLostError, HopFailedError, WeirError
from weir.core.request import SequenceRequest
from weir.core.worker import Incarnation, WorkerInfo

logger = logging.getLogger(__name__)


class PrefillCall:
    """Each attempt leaves it when it is closed; what they share of their requests is the prompt.

    Args:
        num_uncached_tokens: what the worker is expected to compute; counted as its load from now on.
        renew_interval_s: a sixth of the prefill workers' lease.
        on_computed: hears of the result before the attempts do.
    """

    def __init__(
        self,
        client: PrefillClient,
        attempts: Sequence[Attempt],
        in_flight: InFlightLedger,
        *,
        num_uncached_tokens: int,
        renew_interval_s: float,
        on_computed: Callable[[PrefillResult], None],
    ) -> None:
        self._client = client
        self._attempts = list(attempts)
        self._in_flight = in_flight
        self._num_booked_tokens = num_uncached_tokens
        self._renew_interval_s = renew_interval_s
        self._on_computed = on_computed
        self._task: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        in_flight.add(self.worker.incarnation, num_prompt_tokens=num_uncached_tokens)

    @property
    def worker(self) -> WorkerInfo:
        return self._client.info

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Send it, for the attempts that have not left."""
        choices = tuple(
            PrefillChoice(
                choice_index=attempt.choice.choice_index,
                key=attempt.key,
                decode_incarnation=attempt.decode.incarnation,
            )
            for attempt in self._attempts
        )
        if choices:
            self._task = tasks.create_task(self._run(self._attempts[0].request, choices))

    async def rebind(self, attempt: Attempt, decode_incarnation: Incarnation) -> None:
        """Keep what was computed for another decode worker.

        Raises:
            HandoffLostError: the prefill worker has it no longer.
            HopFailedError: the prefill worker was lost.
        """
        try:
            await self._client.rebind(attempt.key, decode_incarnation)
        except HandoffLostError:
            if self._answered.is_set():
                raise
            # The call may still be on its way, or in the worker's queue: the hold exists once it has been answered.
            await self._answered.wait()
            await self._client.rebind(attempt.key, decode_incarnation)

    def leave(self, attempt: Attempt) -> None:
        """Release what is held for a closed attempt; the last one to leave ends the call. Never waits."""
        self._attempts.remove(attempt)
        if self._task is not None and not attempt.is_hold_over:
            self._client.release((attempt.key,), "the gateway has no more use for it")
        if not self._attempts:
            self._unbook()
            if self._task is not None:
                self._task.cancel()

    async def _run(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...]) -> None:
        try:
            result = await self._client.prefill(request, choices)
        except WeirError as error:
            for attempt in tuple(self._attempts):
                attempt.on_prefill_failed(error)
            return
        finally:
            self._unbook()
            self._answered.set()
        self._on_computed(result)
        self._deliver(result)
        await self._renew_until_fetched()

    def _unbook(self) -> None:
        if self._num_booked_tokens:
            self._in_flight.add(self.worker.incarnation, num_prompt_tokens=-self._num_booked_tokens)
            self._num_booked_tokens = 0

    def _deliver(self, result: PrefillResult) -> None:
        by_choice = {token.choice_index: token for token in result.first_tokens}
        for attempt in tuple(self._attempts):
            token = by_choice.get(attempt.choice.choice_index)
            if token is None:
                attempt.on_prefill_failed(HopFailedError("the prefill worker left out a choice", hop="prefill"))
            else:
                attempt.on_first_token(token, result)

    async def _renew_until_fetched(self) -> None:
        """The lease clock starts when the prompt is computed.

        A decode worker renews what it fetches, but not the holds of choices that wait there behind another one's fetch.
        """
        while held := {attempt.key: attempt for attempt in self._attempts if not attempt.is_hold_over}:
            await asyncio.sleep(self._renew_interval_s)
            keys = tuple(key for key, attempt in held.items() if not attempt.is_hold_over)
            if not keys:
                return
            try:
                lost = await self._client.renew(keys)
            except WeirError as error:
                logger.warning(
                    "holds were not renewed", extra={"worker": self.worker.worker_id, "error": error.message}
                )
                continue
            for key in lost:
                if held[key].is_unbound:  # else it was fetched in this moment, or its decode worker finds out
                    gone = HandoffLostError("the prefill worker no longer holds the prompt's KV", hop="transfer")
                    held[key].on_prefill_failed(gone)
