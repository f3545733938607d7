"""A prompt as the interfaces (HTTP, gRPC) give it to the pipeline: tokenized, validated, with its deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from weir.core.deadline import Deadline
from weir.core.model_card import ModelCard
from weir.core.request import RequestId, SamplingParams, SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """One prompt and its n choices.

    Attributes:
        request_id: minted by the gateway.
        sampling: with its seed set.
        priority: lower runs earlier.
        cache_salt, adapter: keep KV apart (`weir.core.block_hash.root_hash`).
        label: the client's own id; not unique.
        arrived_s: when the request reached the gateway, on the monotonic clock.
    """

    request_id: RequestId
    card: ModelCard
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    deadline: Deadline = field(default_factory=Deadline.never)
    label: str = ""
    arrived_s: float = field(default_factory=time.monotonic)

    def sequence(
        self,
        sequence_id: str,
        choice_index: int,
        resumed_output_token_ids: tuple[int, ...] = (),
        *,
        wants_prompt_logprobs: bool = True,
    ) -> SequenceRequest:
        """One of its choices, as workers get it."""
        sampling = self.sampling if wants_prompt_logprobs else replace(self.sampling, prompt_logprobs=None)
        return SequenceRequest(
            request_id=self.request_id,
            sequence_id=sequence_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=sampling,
            choice_index=choice_index,
            resumed_output_token_ids=resumed_output_token_ids,
            priority=self.priority,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
            deadline=self.deadline,
        )
