"""What every worker process has, whichever its role: a name, an engine, a link to Redis, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kv_transfer.handshake import TransferIdentity
from weir.cluster.block_ownership import OwnershipRecorder
from weir.cluster.connection import RedisConnection
from weir.core.worker import Role
from weir.runtime.metrics import WorkerMetrics
from weir.runtime.service import loading
from weir.worker.config import WorkerConfig
from weir.worker.identity import WorkerIdentity

if TYPE_CHECKING:
    from weir.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts that a role is built on; they live as long as `open_parts` is entered."""

    config: WorkerConfig
    identity: WorkerIdentity
    engine: AsyncEngine
    redis: RedisConnection
    ownership: OwnershipRecorder
    registry: CollectorRegistry
    metrics: WorkerMetrics

    @property
    def transfer_identity(self) -> TransferIdentity:
        """Who this worker is to the other end of a KV transfer."""
        return TransferIdentity(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            layout=self.engine.layout,
            fingerprint=self.engine.fingerprint,
            secret=self.config.transfer_secret.encode(),
            memory_domain=self.engine.shared.domain if self.engine.shared is not None else "",
        )


@asynccontextmanager
async def open_parts(config: WorkerConfig, role: Role) -> AsyncIterator[WorkerParts]:
    """Load the model, connect; left backwards.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        ModelLoadError: the checkpoint is at fault.
    """
    # Imports torch, which takes seconds: not before the settings are known to be right.
    with loading():
        from weir.engine.async_engine import AsyncEngine

    engine_config = config.engine_config()
    identity = WorkerIdentity.draw(config.worker_id, role)
    registry = CollectorRegistry()
    async with (
        AsyncEngine(engine_config) as engine,
        RedisConnection.from_url(config.redis_url) as redis,
        OwnershipRecorder(redis, identity.worker_id, identity.incarnation) as ownership,
    ):
        metrics = WorkerMetrics(
            registry,
            model_name=engine.card.name,
            role=role,
            max_num_batched_tokens=engine_config.token_budget(),
            legacy_aliases=config.legacy_aliases,
        )
        metrics.cache_config_info.labels(
            block_size=str(engine.layout.block_size),
            cache_dtype=engine.layout.kv_dtype,
            num_gpu_blocks=str(engine.num_blocks),
            gpu_memory_utilization=str(config.gpu_memory_utilization),
            enable_prefix_caching=str(config.enable_prefix_caching),
        ).set(1)
        yield WorkerParts(
            config=config,
            identity=identity,
            engine=engine,
            redis=redis,
            ownership=ownership,
            registry=registry,
            metrics=metrics,
        )
