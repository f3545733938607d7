"""Ends a request wherever it runs: here, or at another gateway through the workers that have it (rule 15)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Protocol

from gateway.pipeline import GenerationPipeline
from gateway.worker_protocols import DecodeClient, PrefillClient
from weir.cluster.request_journal import RequestRecord
from weir.core.errors import InvalidRequestError, WeirError
from weir.core.request import RequestId
from weir.core.worker import Role

logger = logging.getLogger(__name__)


class JournalReader(Protocol):
    """The part of `weir.cluster.request_journal.RequestJournal` that reads."""

    async def get(self, request_id: RequestId) -> RequestRecord | None: ...


async def abort_request(name: str, pipeline: GenerationPipeline, journal: JournalReader) -> int:
    """End a request by its id, or by its client's label where it runs on this gateway.

    Returns how many prompts (here) or sequences (elsewhere) were ended; 0 for one that is over or unknown.

    Raises:
        InvalidRequestError: it names nothing.
        UnavailableError: it does not run here, and Redis, which knows where it does, is away.
    """
    if not name:
        raise InvalidRequestError("request_id: must not be empty", param="request_id")
    num_here = pipeline.abort(name)
    if num_here:
        return num_here
    record = await journal.get(RequestId(name))
    if record is None or record.state.is_terminal:
        return 0
    counts: Counter[Role] = Counter()

    async def abort_on(client: PrefillClient | DecodeClient) -> None:
        try:
            counts[client.info.role] += await client.abort(record.request_id)
        except WeirError as error:
            logger.warning("a worker could not be told of an abort", extra={"error": error.message})

    async with asyncio.TaskGroup() as tasks:
        for client in _clients(pipeline, record.model):
            tasks.create_task(abort_on(client))
    return max(counts.values(), default=0)


def _clients(pipeline: GenerationPipeline, model: str) -> list[PrefillClient | DecodeClient]:
    """All workers of a model: the record names two of them, and choices may be with others."""
    clients = pipeline.clients
    return [
        clients.get_prefill(worker) if worker.role is Role.PREFILL else clients.get_decode(worker)
        for worker in clients.fleet.workers
        if worker.model == model
    ]
