"""Who a worker process is, and how it describes itself to the cluster."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from weir.core.kv_layout import KvLayout, LayoutFingerprint
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState
from weir.engine.stats import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """A name in the cluster and this start of the process."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role

    @classmethod
    def draw(cls, worker_id: str | None, role: Role) -> WorkerIdentity:
        """A new incarnation; also a new name unless one is given."""
        return cls(
            worker_id=WorkerId(worker_id or f"{role.value}-{uuid.uuid4().hex[:8]}"),
            incarnation=Incarnation(uuid.uuid4().hex),
            role=role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What never changes of a running worker; `info` adds what does."""

    identity: WorkerIdentity
    model: str
    control_address: str
    transfer_address: str
    layout: KvLayout
    fingerprint: LayoutFingerprint
    max_model_len: int

    def info(
        self, stats: EngineStats, *, is_draining: bool, num_waiting: int = 0, queued_tokens: int = 0
    ) -> WorkerInfo:
        """The worker of this moment.

        Args:
            num_waiting, queued_tokens: of requests that wait before the engine.
        """
        return WorkerInfo(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            role=self.identity.role,
            state=WorkerState.DRAINING if is_draining else WorkerState.READY,
            model=self.model,
            control_address=self.control_address,
            transfer_address=self.transfer_address,
            layout=self.layout,
            fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            load=WorkerLoad(
                num_running=stats.num_running + stats.num_importing,
                num_waiting=stats.num_waiting + num_waiting,
                queued_tokens=stats.queued_tokens + queued_tokens,
                free_blocks=stats.free_blocks,
                total_blocks=stats.total_blocks,
                held_blocks=stats.held_blocks,
            ),
        )
