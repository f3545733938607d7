"""The settings of a decode worker: those of every worker."""

from __future__ import annotations

from dataclasses import dataclass

from weir.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: receives the KV of prompts and makes tokens; also computes prompts itself when told to."""
