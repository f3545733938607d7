"""A worker as others see it: one process with one engine, in one role, in one incarnation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NewType

from weir.core.kv_layout import KvLayout, LayoutFingerprint

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""Names one start of a worker process; a restarted worker has a new one."""


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A snapshot for routing; all counts are of this moment.

    Attributes:
        queued_tokens: uncached prompt tokens not computed yet.
        held_blocks: blocks kept for hand-offs that have not ended.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    held_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker registers and every heartbeat refreshes.

    Attributes:
        control_address: host:port of its gRPC service.
        transfer_address: `tcp://host:port` or `unix:///path` of its KV transfer listener; empty for a decode worker.
        protocol_min, protocol_max: versions of the services' protocol it speaks.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    state: WorkerState
    model: str
    control_address: str
    transfer_address: str
    layout: KvLayout
    fingerprint: LayoutFingerprint
    max_model_len: int
    load: WorkerLoad
    protocol_min: int = 1
    protocol_max: int = 1

    def to_json(self) -> str:
        fields = asdict(self)
        fields["role"] = self.role.value
        fields["state"] = self.state.value
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerInfo:
        """Raises ValueError, KeyError or TypeError for anything `to_json` did not write."""
        fields = json.loads(text)
        fields["role"] = Role(fields["role"])
        fields["state"] = WorkerState(fields["state"])
        fields["layout"] = KvLayout(**fields["layout"])
        fields["fingerprint"] = LayoutFingerprint(**fields["fingerprint"])
        fields["load"] = WorkerLoad(**fields["load"])
        return cls(**fields)
