"""A request as it travels between processes, and what comes back of it. All values are frozen.

The gateway expands prompts x n into sequences; everything below the gateway speaks of one sequence (one choice of one
prompt) at a time, except prefill, which computes a prompt once for all of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from weir.core.deadline import Deadline

RequestId = NewType("RequestId", str)
"""Minted by the gateway; a client's own id is only a label beside it."""

HandoffId = NewType("HandoffId", str)
"""Minted by the gateway for one sequence; the same for every epoch."""


@dataclass(frozen=True, slots=True, order=True)
class HandoffKey:
    """Names one attempt to bring one sequence from prefill to decode."""

    handoff_id: HandoffId
    epoch: int

    def __str__(self) -> str:
        return f"hand-off {self.handoff_id}, epoch {self.epoch}"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Already validated by the gateway; stop strings stay there.

    Attributes:
        seed: always set (the gateway draws a missing one), so that every step can be repeated anywhere.
        top_k: 0 means no limit.
        max_tokens: most output tokens, at least 1.
        logit_bias: pairs of token id and addend, each id once.
        logprobs: None for none, else how many alternatives beside the sampled token, 0 or more; -1 means the whole
            vocabulary.
        prompt_logprobs: the same for each prompt token but the first.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence to be computed.

    Attributes:
        sequence_id: unique in the worker; the hand-off id, so one id follows a sequence everywhere.
        prompt_token_ids: the client's prompt.
        resumed_output_token_ids: output of earlier epochs: prefilled with the prompt, counted as output.
        choice_index: which of the prompt's n choices; part of the key of its random draws.
        priority: lower runs earlier.
        adapter, cache_salt: keep KV apart (see `block_hash.root_hash`).
    """

    request_id: RequestId
    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    choice_index: int = 0
    resumed_output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    adapter: str = ""
    cache_salt: str = ""
    deadline: Deadline = field(default_factory=Deadline.never)

    @property
    def num_known_tokens(self) -> int:
        """Tokens known before anything is computed: prompt and resumed output."""
        return len(self.prompt_token_ids) + len(self.resumed_output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens the sequence can ever have, prompt and output together."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the distribution before temperature and truncation.

    Attributes:
        token_id, logprob, rank: the token that stands there; rank 1 is the most likely.
        top_token_ids, top_logprobs: the most likely tokens, best first; may be empty.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one sequence, in order.

    Attributes:
        first_index: output index of `token_ids[0]` (resumed output counts); readers drop what they already have.
        logprobs: one for each token, or empty when none were asked for.
        finish_reason: set on the last delta only.
        stop_token_id: the stop or eos token that ended the sequence; it is also the last of `token_ids`.
        num_cached_tokens: prompt tokens that a prefix hit gave, on the worker that computed the prompt.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """What prefill knows of one choice once the prompt is computed.

    Attributes:
        finish_reason: set when the first token already ended the sequence; then there is nothing to hand off.
    """

    choice_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimings:
    """Where the time of one hand-off went, as the decode worker saw it.

    Attributes:
        transfer_s: from the open to the commit.
        exposed_s: from the seal to the commit: what the client waits for beside prefill.
        first_step_s: from the commit to the first token made by the decode worker.
        size_bytes: KV bytes received.
    """

    transfer_s: float
    exposed_s: float
    first_step_s: float
    size_bytes: int
