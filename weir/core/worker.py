"""A worker as others see it: one process with one engine, in one role, in one incarnation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NewType

from weir.core.json_fields import value_from_fields
from weir.core.kv_layout import KvLayout, LayoutFingerprint

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
"""Versions of the protocol between gateway and workers that this one speaks."""


def speaks_our_protocol(protocol_min: int, protocol_max: int) -> bool:
    """Whether a process that speaks these versions and one of this version have one in common."""
    return protocol_min <= PROTOCOL_MAX and protocol_max >= PROTOCOL_MIN


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
        protocol_min, protocol_max: versions of the protocol between gateway and workers that it speaks.
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
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX

    def to_json(self) -> str:
        fields = asdict(self)
        fields["role"] = self.role.value
        fields["state"] = self.state.value
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerInfo:
        """Of this version or a neighbour; raises ValueError for anything else."""
        return value_from_fields(cls, json.loads(text))
