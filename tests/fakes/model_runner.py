"""A model without weights whose tokens depend on the KV it was given, so that a wrong block table gives wrong tokens.

The "KV" of a token is a 64-bit digest of the token, its position and the digests of all tokens before it, read through
the block table. Logits are a function of all digests up to the row. It lives in a real `PagedKvCache`, so bytes can be
moved between two fakes as between two models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.core.request import FinishReason, RequestId, SamplingParams, SequenceRequest
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.sampler import SamplingRow, sample

VOCAB_SIZE = 48
EOS_TOKEN_ID = 2
MASK = 2**64 - 1


def make_card(*, max_model_len: int = 4096) -> ModelCard:
    return ModelCard(
        name="fake",
        architecture="fake",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        num_parameters=0,
        eos_token_ids=(EOS_TOKEN_ID,),
        bos_token_id=None,
        add_bos_token=False,
        weights_hash="fake",
        created_s=0,
    )


def make_config(**settings: object) -> EngineConfig:
    """Settings that suit the fake: small blocks, a small pool."""
    defaults: dict[str, object] = {
        "device": "cpu",
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return EngineConfig(model_dir=Path("fake"), **(defaults | settings))  # type: ignore[arg-type]


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    resumed: Sequence[int] = (),
    choice_index: int = 0,
    priority: int = 0,
    **fields: object,
) -> SequenceRequest:
    """A request whose other `fields` are those of `SequenceRequest` or of `SamplingParams`; greedy by default."""
    own = {key: fields.pop(key) for key in ("adapter", "cache_salt", "deadline", "request_id") if key in fields}
    own.setdefault("request_id", RequestId(f"request-{name}"))
    return SequenceRequest(
        sequence_id=name,
        prompt_token_ids=tuple(prompt),
        resumed_output_token_ids=tuple(resumed),
        choice_index=choice_index,
        priority=priority,
        sampling=SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | fields)),  # type: ignore[arg-type]
        **own,  # type: ignore[arg-type]
    )


class FakeModelRunner:
    """Satisfies `weir.engine.step_computation.Runner`.

    Attributes:
        before_execute: called with each batch; may wait for a test's event, or raise what a model would.
        steps: for each executed batch, (sequences, tokens).
    """

    def __init__(self, config: EngineConfig, *, max_model_len: int = 4096, runs_ahead: bool = False) -> None:
        assert config.num_blocks is not None
        self.card = make_card(max_model_len=max_model_len)
        self.weights_hash = self.card.weights_hash
        self.max_model_len = config.max_model_len or max_model_len
        self.layout = KvLayout(
            num_layers=1, num_kv_heads=1, head_dim=1, block_size=config.block_size, kv_dtype="float32"
        )
        self.num_blocks = config.num_blocks
        self.cache = PagedKvCache(self.layout, self.num_blocks, torch.device("cpu"))
        self.plan = None
        self.runs_ahead = runs_ahead
        words = self.cache.tensor.view(torch.int32).numpy().view(np.uint32)
        self._words = words.reshape(self.num_blocks, 2, config.block_size)
        self._words[:] = 0xDEADBEEF  # what nobody wrote is no token's digest
        self.before_execute: Callable[[Batch], None] = lambda batch: None
        self.steps: list[tuple[int, int]] = []

    def warm_up(self) -> None:
        """There are no weights to touch."""

    def execute(self, items: Sequence[ScheduledSequence], chosen: torch.Tensor | None = None) -> torch.Tensor:
        items = [
            item
            if item.late_source is None
            else replace(item, token_ids=(int(chosen[item.late_source]),), late_source=None)  # type: ignore[index]
            for item in items
        ]
        batch = Batch.on_host(BatchArrays.from_scheduled(items, self.layout.block_size))
        self.before_execute(batch)
        self.steps.append((batch.num_seqs, batch.num_tokens))
        states = np.zeros(batch.num_tokens, dtype=np.uint64)
        bounds, slots, tokens = batch.cu_seqlens_q.tolist(), batch.slots.tolist(), batch.input_ids.tolist()
        for index, (table, seq_len) in enumerate(
            zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), strict=True)
        ):
            rows = range(bounds[index], bounds[index + 1])
            start = seq_len - len(rows)
            state = fold_digests(self._read(table, start), start=0)
            for row, position in zip(rows, range(start, seq_len), strict=True):
                assert batch.positions[row] == position
                digest = digest_token(state, tokens[row], position)
                self._write(slots[row], digest)
                state = fold_digests([digest], start=position, state=state)
                states[row] = state
        return logits_of(states[batch.logits_indices.numpy()])

    def _read(self, table: list[int], num_tokens: int) -> list[int]:
        size = self.layout.block_size
        blocks = self._words[np.array(table[: -(-num_tokens // size)], dtype=np.int64)].astype(np.uint64)
        digests = (blocks[:, 0] | (blocks[:, 1] << np.uint64(32))).reshape(-1)[:num_tokens]
        return [int(digest) for digest in digests]

    def _write(self, slot: int, digest: int) -> None:
        block, offset = divmod(slot, self.layout.block_size)
        self._words[block, 0, offset] = digest & 0xFFFFFFFF
        self._words[block, 1, offset] = digest >> 32


def digest_token(state: int, token_id: int, position: int) -> int:
    return _mix(state * 31 + token_id * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F)


def fold_digests(digests: Sequence[int], *, start: int, state: int = 0) -> int:
    """All digests up to a position as one number; each counts, and its place counts."""
    for position, digest in enumerate(digests, start):
        state = (state + digest * (2 * position + 1)) & MASK
    return state


def logits_of(states: np.ndarray) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE] float32 between 0 and 8."""
    with np.errstate(over="ignore"):
        mixed = states[:, None] + np.arange(1, VOCAB_SIZE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**21))


def prompt_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """The logits at every position of `token_ids`, computed with no cache at all: [len(token_ids), VOCAB_SIZE]."""
    states, state = [], 0
    for position, token_id in enumerate(token_ids):
        state = fold_digests([digest_token(state, token_id, position)], start=position, state=state)
        states.append(state)
    return logits_of(np.array(states, dtype=np.uint64))


def expected_output(request: SequenceRequest) -> tuple[list[int], FinishReason]:
    """What the request's whole output must be, token by token, computed with no engine."""
    output = list(request.resumed_output_token_ids)
    params = request.sampling
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_TOKEN_ID,))}
    state, num_digested = 0, 0
    tokens = [*request.prompt_token_ids, *output]
    while True:
        for position in range(num_digested, len(tokens)):
            digest = digest_token(state, tokens[position], position)
            state = fold_digests([digest], start=position, state=state)
        num_digested = len(tokens)
        counts = {token_id: output.count(token_id) for token_id in output}
        (sampled,) = sample(
            logits_of(np.array([state], dtype=np.uint64)),
            [
                SamplingRow(
                    logits_row=0,
                    params=params,
                    choice_index=request.choice_index,
                    token_ids=tokens,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    position=len(tokens),
                    output_counts=counts,
                    stop_token_ids=frozenset(stops),
                )
            ],
        )
        output.append(sampled.token_id)
        tokens.append(sampled.token_id)
        if sampled.token_id in stops and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= params.max_tokens:
            return output, FinishReason.LENGTH


def _mix(value: int) -> int:
    value &= MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & MASK
    return value ^ (value >> 31)
