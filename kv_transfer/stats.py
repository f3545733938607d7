"""Counts of what one end of the transfer has done since it started; services read them for their metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferStats:
    """All of them only grow.

    Attributes:
        bytes_by_transport: payload bytes sent or received, by `tcp` or `unix`; `memory` are those that a decode worker
            copied from the prefill worker's memory, counted there only.
        handoffs_total: hand-offs committed.
        failures_by_reason: fetches that failed, by error code; holds that ended otherwise than by COMMIT, by reason.
        stale_frames_total: frames dropped since they named no live hand-off, or one of another epoch.
        refused_total: FETCH and COMMIT frames refused by name.
        leases_expired_total: holds that ended since nobody renewed them, or at their deadline.
        nacked_pieces_total: pieces sent again since their checksum was wrong.
        connections_lost_total: connections that ended, refused ones and our own closing included.
    """

    bytes_by_transport: Counter[str] = field(default_factory=Counter)
    handoffs_total: int = 0
    failures_by_reason: Counter[str] = field(default_factory=Counter)
    stale_frames_total: int = 0
    refused_total: int = 0
    leases_expired_total: int = 0
    nacked_pieces_total: int = 0
    connections_lost_total: int = 0
