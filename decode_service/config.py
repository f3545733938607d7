"""The settings of a decode worker: those of every worker, and how long it waits for a hand-off."""

from __future__ import annotations

from dataclasses import dataclass

from weir.runtime.config import setting
from weir.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: receives the KV of prompts and makes tokens; also computes prompts itself when told to."""

    handoff_timeout_s: float = setting(120.0, help="longest wait for the KV of one prompt", minimum=0.1)
