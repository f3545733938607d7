"""The engine's mutable view of one sequence: its tokens, how far they are computed, and where their KV lies.

It decides nothing about other sequences and touches no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from weir.core.block_hash import BlockHash, hash_block, root_hash
from weir.core.errors import WeirError
from weir.core.request import FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from weir.engine.prefix_load import PrefixLoad


class SequenceState(Enum):
    """Where a sequence stands.

    WAITING owns no block; LOADING owns blocks into which its cold prefix comes back; CLAIMED references its prefix and
    has a count promised; IMPORTING owns blocks that a transfer writes; RUNNING computes; ENDED owns none. ABANDONED
    ended while a transfer may still write its blocks: they are kept until the writer says that it has stopped.
    """

    WAITING = "waiting"
    LOADING = "loading"
    CLAIMED = "claimed"
    IMPORTING = "importing"
    RUNNING = "running"
    ABANDONED = "abandoned"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """One of the choices that share one prefill.

    Attributes:
        hold_id: names the choice's own reference on the blocks, which outlives the prefill.
    """

    choice_index: int
    hold_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEnd:
    """Whether and why a token is the last of its sequence."""

    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


class Sequence:
    """One choice of one prompt; or, on prefill, one prompt with all of its choices (`choices` is not empty).

    Attributes:
        arrival: grows with every sequence of an engine; with the priority it orders them.
        reader: where the sequence's news go; opaque here.
        arrived_s, admitted_s: on the engine's clock; the second is of the first admission.
        token_ids: prompt, resumed output, then the output made here.
        num_computed_tokens: tokens whose K and V are in the cache.
        num_launched_tokens: tokens after those that are being computed by steps whose results nobody has taken yet.
        num_late_tokens: output tokens that such steps choose and later steps may build on before they are known.
        num_cached_tokens: prompt tokens that a prefix hit gave when the sequence was first admitted; None before.
        block_ids: the block table. Only the KV cache manager changes it.
        block_hashes: of the full blocks of `token_ids`, as far as anyone asked for them.
        num_published_blocks: leading blocks whose content the pool knows.
        num_claimed_blocks: promised and not yet allocated.
        load: what of its prefix is coming back from under the pool.
        output_counts: how often each token occurs in the output, resumed output included.
        num_prompt_logprobs: prompt positions whose log-probabilities are known; a preemption forgets none.
        prompt_logprobs: those of them that have not been delivered.
        error: why an ABANDONED sequence ended.
    """

    __slots__ = (
        "admitted_s",
        "arrival",
        "arrived_s",
        "block_hashes",
        "block_ids",
        "choices",
        "error",
        "hold_ids",
        "load",
        "num_cached_tokens",
        "num_claimed_blocks",
        "num_computed_tokens",
        "num_late_tokens",
        "num_launched_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "output_counts",
        "prompt_logprobs",
        "reader",
        "request",
        "sort_key",
        "state",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: SequenceRequest,
        *,
        arrival: int,
        arrived_s: float,
        eos_token_ids: tuple[int, ...] = (),
        choices: tuple[PrefillChoice, ...] = (),
        reader: Any = None,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.sort_key = (request.priority, arrival)
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.choices = choices
        self.hold_ids = [choice.hold_id for choice in choices]
        self.reader = reader
        self.state = SequenceState.WAITING
        self.error: WeirError | None = None

        self.token_ids = [*request.prompt_token_ids, *request.resumed_output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_late_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_prompt_logprobs = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.output_counts: dict[int, int] = {}
        for token_id in request.resumed_output_token_ids:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1
        eos = () if request.sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset((*request.sampling.stop_token_ids, *eos))

        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_published_blocks = 0
        self.num_claimed_blocks = 0
        self.load: PrefixLoad | None = None

    @property
    def sequence_id(self) -> str:
        return self.request.sequence_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def is_prefill_only(self) -> bool:
        return bool(self.choices)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """The known tokens and those that are late."""
        return len(self.token_ids) + self.num_late_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Expected tokens that no step computes yet: 1 for a sequence that decodes; more while it catches up; 0 while
        its next token must be known first."""
        return self.num_expected_tokens - self.num_computed_tokens - self.num_launched_tokens

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may be launched on its next token before that is known.

        Not if that token is the last for sure, nor where the choice of the one after it looks back at it.
        """
        sampling = self.sampling
        return (
            not self.is_prefill_only
            and self.num_output_tokens + self.num_late_tokens + 1 < sampling.max_tokens
            and sampling.repetition_penalty == 1
            and not sampling.frequency_penalty
            and not sampling.presence_penalty
            and not sampling.bad_words_token_ids
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt position still owes its log-probabilities, which a prefix hit could not give."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def extend_hashes(self, block_size: int) -> None:
        """Bring `block_hashes` up to every full block of the tokens known now."""
        hashes = self.block_hashes
        parent = hashes[-1] if hashes else root_hash(adapter=self.request.adapter, cache_salt=self.request.cache_salt)
        for start in range(len(hashes) * block_size, self.num_tokens - block_size + 1, block_size):
            parent = hash_block(parent, self.token_ids[start : start + block_size])
            hashes.append(parent)

    def append(self, token_id: int) -> None:
        """Add one output token, not yet computed."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def end_of(self, token_id: int) -> TokenEnd:
        """How the sequence would stand if `token_id` were its next output token."""
        num_output_tokens = self.num_output_tokens + 1
        if token_id in self.stop_token_ids and num_output_tokens > self.sampling.min_tokens:
            return TokenEnd(finish_reason=FinishReason.STOP, stop_token_id=token_id)
        if num_output_tokens >= self.sampling.max_tokens:
            return TokenEnd(finish_reason=FinishReason.LENGTH)
        return TokenEnd()
