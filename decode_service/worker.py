"""What a decode worker does: claims blocks, brings KV in or computes it here, and lets sequences run to their end.

Meaning only: no message format and no socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from decode_service.events import Denied, Granted, OpenSequence
from decode_service.handoff import HandoffImporter
from decode_service.session import Session
from kv_transfer.transfer_state import Received
from weir.cluster.block_ownership import BlockGroup, HoldingKind
from weir.core.errors import OverloadedError, UnavailableError, WrongIncarnationError
from weir.core.request import RequestId
from weir.core.worker import Incarnation
from weir.engine.claim import Denial

if TYPE_CHECKING:
    from weir.cluster.block_ownership import OwnershipRecorder
    from weir.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class DecodeWorker:
    """Runs the sequences of any number of gateways on one engine.

    Args:
        incarnation: of this start of the process; opens that mean another one are refused.
        max_waiting: sequences that may wait in the engine; more are refused.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        importer: HandoffImporter,
        ownership: OwnershipRecorder,
        *,
        incarnation: Incarnation,
        max_waiting: int,
    ) -> None:
        self._engine = engine
        self._ownership = ownership
        self._importer = importer
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._sessions: set[Session] = set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return sum(session.num_open for session in self._sessions)

    @property
    def num_waiting(self) -> int:
        """Always 0: whatever waits here, waits in the engine."""
        return 0

    @property
    def queued_tokens(self) -> int:
        """Always 0, as `num_waiting`."""
        return 0

    @asynccontextmanager
    async def session(self, gateway_id: str) -> AsyncIterator[Session]:
        """Everything of one gateway; at the end of the block all of it has ended and nothing of it is written."""
        async with asyncio.TaskGroup() as group:
            session = Session(gateway_id, self._engine, self, group)
            self._sessions.add(session)
            logger.info("a gateway connected", extra={"gateway_id": gateway_id})
            try:
                yield session
            finally:
                self._sessions.discard(session)
                session.close()
                logger.info("a gateway has gone", extra={"gateway_id": gateway_id})

    async def start(self, opened: OpenSequence, session: Session) -> Received | None:
        """Grant and start one sequence, or deny it; see `SequenceStarter`.

        Raises:
            WrongIncarnationError, UnavailableError, OverloadedError: before any work.
            CapacityExceededError, ContextLengthError: it can never run here.
            HandoffError, WorkerLostError, DeadlineExceededError: its KV did not come.
        """
        if opened.incarnation != self._incarnation:
            raise WrongIncarnationError(f"this is incarnation {self._incarnation}, the call means {opened.incarnation}")
        if self._is_draining:
            raise UnavailableError("the worker is draining", retry_after_s=RETRY_AFTER_S)
        if self._engine.stats().num_waiting >= self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} sequences wait already", retry_after_s=RETRY_AFTER_S)
        request = opened.request
        if opened.source is None:
            await self._engine.submit(request, session.tokens)
            groups = (BlockGroup(first_block=0, num_blocks=self._engine.layout.blocks_for(request.num_known_tokens)),)
            self._ownership.record_destination(request.request_id, opened.key, groups, request.deadline)
            session.emit(Granted(stream_id=opened.stream_id, num_cached_tokens=0, num_claimed_blocks=0))
            return None
        answer = await self._engine.claim(request, session.tokens)
        if isinstance(answer, Denial):
            session.emit(Denied(stream_id=opened.stream_id, retry_after_s=answer.retry_after_s))
            return None
        session.emit(
            Granted(
                stream_id=opened.stream_id,
                num_cached_tokens=answer.num_cached_tokens,
                num_claimed_blocks=answer.num_claimed_blocks,
            )
        )
        return await self._importer.run(opened.key, request, opened.source, num_cached_tokens=answer.num_cached_tokens)

    def ended(self, opened: OpenSequence) -> None:
        """Nothing of the sequence is to be seen here any more; see `SequenceStarter`."""
        self._ownership.clear(opened.request.request_id, opened.key, HoldingKind.DESTINATION)

    def abort(self, request_id: RequestId) -> int:
        """End everything of a request, whichever gateway opened it; how many sequences there were."""
        return sum(session.abort(request_id) for session in self._sessions)

    def refuse_new(self) -> None:
        """Start to drain: sequences that are opened from now on are refused."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, wait until none is open, then end the sessions.

        What runs after `timeout_s` ends with an error that its gateway can read; then the answer is False.
        """
        self.refuse_new()
        is_complete = True
        try:
            async with asyncio.timeout(timeout_s):
                for session in list(self._sessions):
                    await session.wait_until_idle()
        except TimeoutError:
            is_complete = False
        for session in list(self._sessions):
            session.fail_all(
                UnavailableError("the decode worker has shut down", hop="decode", retry_after_s=RETRY_AFTER_S)
            )
            session.close()
        return is_complete

    async def reset_prefix_cache(self) -> bool:
        """Forget every block that no sequence uses; False while some are in use."""
        return await self._engine.reset_prefix_cache()
