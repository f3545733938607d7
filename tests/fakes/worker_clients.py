"""A cluster of fake workers, and the facts that tests of the gateway make workers and models of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.fleet import Fleet
from tests.fakes.decode_client import FakeDecodeClient
from tests.fakes.prefill_client import FakePrefillClient
from weir.core.errors import WorkerLostError
from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState

MODEL = "tiny"


def model_card(name: str = MODEL, *, max_model_len: int = 1024) -> ModelCard:
    return ModelCard(
        name=name,
        architecture="llama",
        max_model_len=max_model_len,
        vocab_size=1000,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=32,
        num_parameters=1,
        eos_token_ids=(2,),
        bos_token_id=None,
        add_bos_token=False,
        weights_hash="w",
        created_s=0,
    )


def worker_info(
    worker_id: str,
    role: Role,
    *,
    model: str = MODEL,
    state: WorkerState = WorkerState.READY,
    incarnation: str | None = None,
    control_address: str = "127.0.0.1:1",
    block_size: int = 4,
    weights_hash: str = "w",
    load: WorkerLoad | None = None,
    protocol_min: int = 1,
    protocol_max: int = 1,
) -> WorkerInfo:
    """A worker with an idle pool of 100 blocks, if nothing else is said."""
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=block_size, kv_dtype="float32")
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation or f"{worker_id}-1"),
        role=role,
        state=state,
        model=model,
        control_address=control_address,
        transfer_address="tcp://127.0.0.1:2" if role is Role.PREFILL else "",
        layout=layout,
        fingerprint=layout.fingerprint(weights_hash),
        max_model_len=1024,
        load=WorkerLoad(free_blocks=100, total_blocks=100) if load is None else load,
        protocol_min=protocol_min,
        protocol_max=protocol_max,
    )


class FakeWorkerClients:
    """The workers that can be reached, as `gateway.worker_protocols.WorkerClients` tells of them.

    Attributes:
        workers: those that are only heard of.
    """

    def __init__(self, *, prefill: Sequence[FakePrefillClient] = (), decode: Sequence[FakeDecodeClient] = ()) -> None:
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.workers: tuple[WorkerInfo, ...] = ()
        self._changed = asyncio.Event()
        self._waiters = asyncio.Event()

    @property
    def fleet(self) -> Fleet:
        connected = (*self.prefill, *(each for each in self.decode if each.is_connected))
        return Fleet([*self.workers, *(client.info for client in connected)])

    def get_prefill(self, worker: WorkerInfo) -> FakePrefillClient:
        for client in self.prefill:
            if client.info.incarnation == worker.incarnation:
                return client
        raise WorkerLostError("gone", hop="prefill")

    def get_decode(self, worker: WorkerInfo) -> FakeDecodeClient:
        for client in self.decode:
            if client.info.incarnation == worker.incarnation:
                return client
        raise WorkerLostError("gone", hop="decode")

    async def wait_for_change(self) -> None:
        self._waiters.set()
        await self._changed.wait()
        self._changed.clear()

    async def somebody_waits(self) -> None:
        """Return once the pipeline waits for a worker."""
        await self._waiters.wait()

    def announce_change(self) -> None:
        self._changed.set()
