"""Real engines on small models for tests of the whole path, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fakes.hidden_cache import FileSharing, HeldCopies, hide_from_host
from tests.fakes.worker_pair import WorkerPair
from weir.engine.async_engine import AsyncEngine
from weir.engine.block_copies import BlockCopies
from weir.engine.config import EngineConfig
from weir.engine.memory_sharing import open_sharing
from weir.engine.step_computation import Runner, load_model_runner

MAX_MODEL_LEN = 512
POOL_TOKENS = 4096


def engine_of(
    model_dir: Path,
    *,
    block_size: int = 16,
    copies: HeldCopies | None = None,
    sharing: FileSharing | None = None,
    **settings: Any,
) -> AsyncEngine:
    """An engine with a pool of some sequences, if nothing else is said.

    Args:
        copies: the host does not see its blocks, and these bring them there and back.
        sharing: others map them so; without the kernels that were told where the blocks are.
    """

    def load(config: EngineConfig) -> Runner:
        runner = load_model_runner(config)
        if copies is not None:
            hide_from_host(runner.cache, None if sharing is None else sharing.file)
        return runner

    defaults: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": max(POOL_TOKENS // block_size, 8),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    if sharing is not None:
        defaults |= {"transfer_memory": "cuda_ipc", "kernel_cache_dir": None}
    return AsyncEngine(
        EngineConfig(model_dir=model_dir, block_size=block_size, device="cpu", **defaults | settings),
        load_runner=load,
        make_copies=lambda device: copies or BlockCopies(device),
        open_sharing=open_sharing if sharing is None else sharing.open,
    )


@asynccontextmanager
async def real_pair(
    model_dir: Path,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[WorkerPair]:
    """Two workers on two engines of one model; settings of the engines, options of the pair."""
    async with engine_of(model_dir, **prefill or {}) as source, engine_of(model_dir, **decode or {}) as sink:
        async with WorkerPair(source, sink, **options) as pair:
            yield pair


def prompt_of(num_tokens: int, *, seed: int = 0, vocab_size: int = 380) -> tuple[int, ...]:
    """Token ids without a pattern, none of them special."""
    value = seed * 7919 + 17
    ids = []
    for _ in range(num_tokens):
        value = (value * 1103515245 + 12345) % 2**31
        ids.append(3 + (value >> 8) % (vocab_size - 3))
    return tuple(ids)
