"""What a prefill worker does: computes a prompt once for all of its choices and holds the KV until it was fetched.

Meaning only: no message format and no socket. The engine owns blocks and holds, the transfer server owns leases; here
the two meet. An engine hold is released in one place, when the transfer says that the hold of a choice has ended and
nothing of it is in flight (handoff.md, rule 2).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.transfer_state import EndReason, Seal
from prefill_service.held_blocks import HeldBlockBudget
from prefill_service.source import EngineBlockSource
from weir.cluster.block_ownership import BlockGroup, HoldingKind
from weir.core.deadline import Deadline
from weir.core.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    WeirError,
    WrongIncarnationError,
)
from weir.core.request import FirstToken, HandoffKey, RequestId, SequenceRequest, TokenLogprobs
from weir.core.worker import Incarnation
from weir.engine.sequence import PrefillChoice
from weir.runtime.tracing import tracer

if TYPE_CHECKING:
    from kv_transfer.offer import Offer
    from kv_transfer.sender import TransferServer
    from weir.cluster.block_ownership import OwnershipRecorder
    from weir.engine.async_engine import AsyncEngine, PrefillProgress

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffChoice:
    """One choice of a prompt, and the decode worker's start that may fetch it."""

    choice_index: int
    key: HandoffKey
    decode_incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """A computed prompt: one first token for each choice, in the order asked for."""

    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...]
    queue_s: float
    prefill_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """A prompt that is being computed, or of which a hold is left."""

    request: SequenceRequest
    choices: tuple[HandoffChoice, ...]
    num_blocks: int
    source: EngineBlockSource
    offers: dict[HandoffKey, Offer] = field(default_factory=dict)
    open_keys: set[HandoffKey] = field(default_factory=set)
    scope: asyncio.Timeout | None = None  # while it is being computed
    is_aborted: bool = False
    has_share: bool = False

    def stop(self) -> None:
        """End the computation at its next chunk; nothing once it is over."""
        self.is_aborted = True
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class PrefillWorker:
    """Prefills on one engine and hands off over one transfer server.

    Args:
        incarnation: of this start of the process; calls that mean another one are refused.
        budget: how many blocks may be computed or held at once.
        max_queue_s: longest wait for a share of them. It also ends the circle of two prompts of which one holds blocks
            here and waits for room on a decode worker, and the other the other way round.
        lease_s: how long the transfer keeps a computed prompt that nobody fetches; only to say so to others.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        transfer: TransferServer,
        ownership: OwnershipRecorder,
        *,
        incarnation: Incarnation,
        budget: HeldBlockBudget,
        max_queue_s: float,
        lease_s: float,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._ownership = ownership
        self._incarnation = incarnation
        self._budget = budget
        self._max_queue_s = max_queue_s
        self._lease_s = lease_s
        self._prompts: set[_Prompt] = set()
        self._by_key: dict[HandoffKey, _Prompt] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_held(self) -> int:
        """Choices whose blocks are kept."""
        return len(self._by_key)

    @property
    def num_held_blocks(self) -> int:
        """Blocks computed or held for hand-offs; blocks that two prompts share count twice."""
        return self._budget.num_taken

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for held blocks to come free."""
        return self._budget.num_waiting

    @property
    def queued_tokens(self) -> int:
        """Tokens of the prompts that wait for held blocks."""
        waiting = (prompt for prompt in self._prompts if prompt.scope is not None and not prompt.has_share)
        return sum(prompt.request.num_known_tokens for prompt in waiting)

    async def prefill(
        self, request: SequenceRequest, choices: tuple[HandoffChoice, ...], *, incarnation: Incarnation
    ) -> PrefillResult:
        """Compute the prompt of `request`; its KV is offered to the choices' decode workers from now on.

        Cancelling stops the computation at its next chunk and takes every offer back; so does the release of all its
        choices. After it returned, each choice is held until it was fetched, released or aborted, or its lease ends; a
        choice that its first token finished is not held at all.

        Raises:
            WrongIncarnationError, UnavailableError, OverloadedError: before any work.
            CapacityExceededError, ContextLengthError: it can never run here.
            DeadlineExceededError, RequestCancelledError: its time ended, or it was released or aborted by its id.
            ConflictError: one of the keys is offered already, or was released before.
        """
        self._check(choices, incarnation)
        prompt = _Prompt(
            request=request,
            choices=choices,
            num_blocks=self._engine.layout.blocks_for(request.num_known_tokens),
            source=EngineBlockSource(self._engine),
        )
        self._prompts.add(prompt)
        self._is_idle.clear()
        error: WeirError = RequestCancelledError("the prefill was cancelled", hop="prefill")
        try:
            with tracer().start_as_current_span("prefill"):
                async with asyncio.timeout_at(_loop_time(request.deadline)) as prompt.scope:
                    self._offer(prompt)
                    await self._take_share(prompt)
                    return await self._compute(prompt)
        except TimeoutError as exc:
            if not prompt.is_aborted:
                error = DeadlineExceededError("the deadline passed during prefill", hop="prefill")
            raise error from exc
        except WeirError as exc:
            exc.hop = exc.hop or "prefill"
            error = exc
            raise
        finally:
            prompt.scope = None
            self._withdraw(prompt, error)
            for choice in choices:  # a hold that ended before the engine knew it was made after that
                if choice.key not in prompt.open_keys:
                    self._engine.release_hold(_hold_id(choice.key))
            self._settle(prompt)

    def release(self, keys: Iterable[HandoffKey]) -> int:
        """End holds by name, at any epoch up to the key's; how many there were."""
        return sum(self._transfer.release(key) for key in keys)

    def rebind(self, key: HandoffKey, decode_incarnation: Incarnation) -> None:
        """Let another start of a decode worker fetch `key`. Raises HandoffLostError if it is not held any more."""
        self._transfer.rebind(key, decode_incarnation)

    def renew(self, keys: Iterable[HandoffKey]) -> tuple[HandoffKey, ...]:
        """Give holds another lease; the keys that are not held any more."""
        lost: list[HandoffKey] = []
        for key in keys:
            if not self._transfer.renew(key):
                lost.append(key)
            elif (prompt := self._by_key.get(key)) is not None and not prompt.offers:
                self._record(prompt, key)
        return tuple(lost)

    def abort(self, request_id: RequestId) -> int:
        """End everything of a request, at any epoch; how many of its choices there were."""
        aborted = 0
        for prompt in [prompt for prompt in self._prompts if prompt.request.request_id == request_id]:
            aborted += len(prompt.open_keys)
            prompt.stop()
            for key in tuple(prompt.open_keys):
                self._transfer.release(key)
        return aborted

    def refuse_new(self) -> None:
        """Start to drain: prompts that come from now on are refused."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new prompts and wait until no hold is left; False if `timeout_s` passed before."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    async def reset_prefix_cache(self) -> bool:
        """Forget every block that nothing uses; False while some are in use."""
        return await self._engine.reset_prefix_cache()

    def _check(self, choices: tuple[HandoffChoice, ...], incarnation: Incarnation) -> None:
        if incarnation != self._incarnation:
            raise WrongIncarnationError(
                f"this is incarnation {self._incarnation}, the call means {incarnation}", hop="prefill"
            )
        if self._is_draining:
            raise UnavailableError("the worker is draining", hop="prefill", retry_after_s=RETRY_AFTER_S)
        if not choices:
            raise InvalidRequestError("a prefill needs at least one choice", param="choices", hop="prefill")

    def _offer(self, prompt: _Prompt) -> None:
        """Make every choice known to the transfer, so that a FETCH that comes early waits here and is not lost."""
        for choice in prompt.choices:
            if choice.key in self._by_key:
                raise ConflictError(f"{choice.key} is offered already")
            self._by_key[choice.key] = prompt  # before the offer, which may end at once
            prompt.open_keys.add(choice.key)
            try:
                prompt.offers[choice.key] = self._transfer.offer(
                    choice.key,
                    decode_incarnation=choice.decode_incarnation,
                    adapter=prompt.request.adapter,
                    source=prompt.source,
                    deadline=prompt.request.deadline,
                    on_end=self._on_end,
                )
            except ConflictError:
                del self._by_key[choice.key]
                prompt.open_keys.discard(choice.key)
                raise

    async def _take_share(self, prompt: _Prompt) -> None:
        try:
            async with asyncio.timeout(self._max_queue_s):
                await self._budget.take(prompt.num_blocks)
        except TimeoutError as exc:
            raise OverloadedError(
                f"no KV blocks came free for the prompt within {self._max_queue_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from exc
        prompt.has_share = True

    async def _compute(self, prompt: _Prompt) -> PrefillResult:
        choices = tuple(
            PrefillChoice(choice_index=choice.choice_index, hold_id=_hold_id(choice.key)) for choice in prompt.choices
        )
        async with aclosing(await self._engine.prefill(prompt.request, choices)) as run:
            async for progress in run:
                prompt.source.extend(progress)
                if progress.first_tokens is not None:
                    return self._seal(prompt, progress)
                num_ready_blocks = progress.num_computed_tokens // prompt.source.block_size
                for offer in prompt.offers.values():
                    offer.extend(num_ready_blocks)
        raise AssertionError("a prefill run ended without first tokens")

    def _seal(self, prompt: _Prompt, last: PrefillProgress) -> PrefillResult:
        """Complete every offer with its first token; a choice that is finished by it ends here."""
        assert last.first_tokens is not None
        prompt.scope = None  # it is computed: what ends a choice from now on stops nothing
        by_index = {first_token.choice_index: first_token for first_token in last.first_tokens}
        for choice in prompt.choices:
            first_token = by_index[choice.choice_index]
            if first_token.finish_reason is not None:
                self._transfer.release(choice.key)
                continue
            offer = prompt.offers[choice.key]
            offer.extend(prompt.num_blocks)
            offer.seal(
                Seal(
                    num_tokens=prompt.request.num_known_tokens,
                    first_token=first_token,
                    num_cached_tokens=last.num_cached_tokens,
                )
            )
            if choice.key in prompt.open_keys:
                self._record(prompt, choice.key)
        prompt.offers.clear()  # nothing to withdraw any more
        return PrefillResult(
            first_tokens=tuple(by_index[choice.choice_index] for choice in prompt.choices),
            num_cached_tokens=last.num_cached_tokens,
            prompt_logprobs=last.prompt_logprobs,
            queue_s=last.queue_s,
            prefill_s=last.prefill_s,
        )

    def _withdraw(self, prompt: _Prompt, error: WeirError) -> None:
        """Take back what was offered and not sealed."""
        for offer in prompt.offers.values():
            offer.fail(error)
        prompt.offers.clear()

    def _on_end(self, key: HandoffKey, reason: EndReason) -> None:
        """The transfer is done with a hold, for good: only now may the engine reuse its blocks."""
        prompt = self._by_key.pop(key)
        self._engine.release_hold(_hold_id(key))
        self._ownership.clear(prompt.request.request_id, key, HoldingKind.SOURCE)
        prompt.open_keys.discard(key)
        if not prompt.open_keys:
            prompt.stop()  # nobody wants it any more
        self._settle(prompt)

    def _record(self, prompt: _Prompt, key: HandoffKey) -> None:
        """Mirror a hold that has a lease now."""
        until = prompt.request.deadline.earlier(Deadline.after(self._lease_s))
        groups = (BlockGroup(first_block=0, num_blocks=prompt.num_blocks),)
        self._ownership.record_source(prompt.request.request_id, key, groups, until)

    def _settle(self, prompt: _Prompt) -> None:
        """Forget a prompt that is neither computed nor held, and give its share back."""
        if prompt.scope is not None or prompt.open_keys or prompt not in self._prompts:
            return
        self._prompts.remove(prompt)
        if prompt.has_share:
            self._budget.give_back(prompt.num_blocks)
        if not self._prompts:
            self._is_idle.set()


def _hold_id(key: HandoffKey) -> str:
    return f"{key.handoff_id}/{key.epoch}"


def _loop_time(deadline: Deadline) -> float | None:
    """The deadline on the running loop's clock."""
    remaining_s = deadline.remaining_s()
    return None if math.isinf(remaining_s) else asyncio.get_running_loop().time() + remaining_s
