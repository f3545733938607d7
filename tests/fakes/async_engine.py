"""An engine without weights whose every token depends on all KV before it, and whose steps a test can hold back.

Only the model is played: scheduling, blocks, holds and claims are the real ones. KV of a token is (token id, position);
the next token is a sum over what the block table gives. So a block that was not transferred, or somebody else's, gives
another token or fails the step.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from tests.fakes.hidden_cache import FileSharing, HeldCopies, hide_from_host
from tests.fakes.worker_pair import WorkerPair
from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.engine.async_engine import AsyncEngine
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.block_copies import BlockCopies
from weir.engine.config import EngineConfig
from weir.engine.memory_sharing import open_sharing
from weir.engine.paged_kv_cache import PagedKvCache

VOCAB_SIZE = 997
EOS = 0

CARD = ModelCard(
    name="counting",
    architecture="counting",
    max_model_len=2048,
    vocab_size=VOCAB_SIZE,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    hidden_size=2,
    num_parameters=0,
    eos_token_ids=(EOS,),
    bos_token_id=None,
    add_bos_token=False,
    weights_hash="counting",
    created_s=0,
)


class CountingRunner:
    """A `weir.engine.step_computation.Runner`. Steps run freely until `hold`; then each needs an `allow`."""

    def __init__(self, config: EngineConfig) -> None:
        self.card = CARD
        self.weights_hash = CARD.weights_hash
        self.layout = KvLayout(
            num_layers=1, num_kv_heads=1, head_dim=2, block_size=config.block_size, kv_dtype="float32"
        )
        self.num_blocks = config.num_blocks or 64
        self.max_model_len = config.max_model_len or min(CARD.max_model_len, self.num_blocks * config.block_size)
        self.cache = PagedKvCache(self.layout, self.num_blocks, torch.device("cpu"))
        self.plan = None
        self.runs_ahead = False
        self._changed = threading.Condition()
        self._num_allowed = 0
        self._is_held = False
        self.num_steps_begun = 0
        self.is_broken = False
        """Every step from now on fails."""

    def hold(self) -> None:
        with self._changed:
            self._is_held = True
            self._num_allowed = self.num_steps_begun

    def allow(self, num_steps: int = 1) -> None:
        with self._changed:
            self._num_allowed += num_steps
            self._changed.notify_all()

    def run_freely(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def warm_up(self) -> None:
        """Nothing to warm."""

    def execute(self, items: Sequence[ScheduledSequence], chosen: torch.Tensor | None = None) -> torch.Tensor:
        batch = Batch.on_host(BatchArrays.from_scheduled(items, self.layout.block_size))
        with self._changed:
            self.num_steps_begun += 1
            self._changed.wait_for(lambda: not self._is_held or self.num_steps_begun <= self._num_allowed)
        if self.is_broken:
            raise RuntimeError("broken")
        layer = self.cache.layer(0)
        size = self.layout.block_size
        for slot, token_id, position in zip(
            batch.slots.tolist(), batch.input_ids.tolist(), batch.positions.tolist(), strict=True
        ):
            value = torch.tensor([token_id, position], dtype=torch.float32)
            layer.keys[slot // size, 0, slot % size] = value
            layer.values[slot // size, 0, slot % size] = value
        next_tokens: dict[int, int] = {}
        for row in range(batch.num_seqs):
            first, end = batch.cu_seqlens_q[row].item(), batch.cu_seqlens_q[row + 1].item()
            seq_len = int(batch.seq_lens[row].item())
            blocks = batch.block_tables[row].long()
            known = layer.values[blocks, 0].reshape(-1, 2)[:seq_len]
            assert known[:, 1].tolist() == list(range(seq_len)), "the cache holds somebody else's tokens"
            weights = torch.arange(seq_len) % 31 + 1
            sums = (known[:, 0].long() * weights).cumsum(0)
            for index in range(int(first), int(end)):
                next_tokens[index] = int(sums[seq_len - (int(end) - index)]) % (VOCAB_SIZE - 1) + 1
        logits = torch.zeros(len(batch.logits_indices), VOCAB_SIZE)
        for index, row in enumerate(batch.logits_indices.tolist()):
            logits[index, next_tokens[row]] = 10.0
            logits[index, (next_tokens[row] * 7) % (VOCAB_SIZE - 1) + 1] += 9.0
        return logits


class FakeEngine(AsyncEngine):
    """An `AsyncEngine` of a `CountingRunner`, which is its attribute `runner`.

    Args:
        copies: the host does not see its blocks, and these bring them there and back.
        sharing: others map them so.
    """

    runner: CountingRunner

    def __init__(
        self, *, copies: HeldCopies | None = None, sharing: FileSharing | None = None, **settings: Any
    ) -> None:
        options: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 16}
        if sharing is not None:
            options["transfer_memory"] = "cuda_ipc"
        self.copies = copies
        self.sharing = sharing
        super().__init__(
            EngineConfig(model_dir=Path("/nowhere"), **options | settings),
            load_runner=self._load,
            make_copies=lambda device: copies or BlockCopies(device),
            open_sharing=open_sharing if sharing is None else sharing.open,
        )

    def _load(self, config: EngineConfig) -> CountingRunner:
        self.runner = CountingRunner(config)
        if self.copies is not None:
            hide_from_host(self.runner.cache, None if self.sharing is None else self.sharing.file)
        return self.runner

    async def __aexit__(self, *exc_info: object) -> None:
        self.runner.run_freely()
        if self.copies is not None:
            self.copies.run_freely()
        await super().__aexit__(*exc_info)


class CountingPair(WorkerPair):
    """A `WorkerPair` whose engines are known to be played."""

    prefill_engine: FakeEngine
    decode_engine: FakeEngine


def expected_tokens(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What a `CountingRunner` answers greedily."""
    known = list(prompt)
    for _ in range(num_tokens):
        total = sum(token * (position % 31 + 1) for position, token in enumerate(known))
        known.append(total % (VOCAB_SIZE - 1) + 1)
    return tuple(known[len(prompt) :])


@asynccontextmanager
async def counting_pair(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[CountingPair]:
    """Two workers on two engines; settings of the engines, options of the pair."""
    async with FakeEngine(**prefill or {}) as source, FakeEngine(**decode or {}) as sink:
        async with CountingPair(source, sink, **options) as pair:
            yield pair
