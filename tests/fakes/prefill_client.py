"""A prefill worker as the pipeline sees it, played by the test: it answers a prompt when told to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.worker_protocols import PrefillChoice, PrefillResult
from weir.core.errors import WeirError
from weir.core.request import FirstToken, HandoffKey, RequestId, SequenceRequest, TokenLogprobs
from weir.core.worker import Incarnation, WorkerInfo


@dataclass(eq=False)
class FakePrefill:
    """One call of the pipeline."""

    request: SequenceRequest
    choices: tuple[PrefillChoice, ...]
    answer: asyncio.Future[PrefillResult]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    def first_tokens(
        self, *tokens: FirstToken, num_cached_tokens: int = 0, prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> None:
        self.answer.set_result(
            PrefillResult(
                first_tokens=tokens,
                num_cached_tokens=num_cached_tokens,
                prompt_logprobs=prompt_logprobs,
                queue_s=0.01,
                prefill_s=0.02,
            )
        )

    def first_token(self, token_id: int, *, num_cached_tokens: int = 0) -> None:
        """The same first token for every choice."""
        tokens = (FirstToken(choice_index=choice.choice_index, token_id=token_id) for choice in self.choices)
        self.first_tokens(*tokens, num_cached_tokens=num_cached_tokens)

    def fail(self, error: WeirError) -> None:
        self.answer.set_exception(error)


@dataclass(eq=False)
class FakePrefillClient:
    info: WorkerInfo
    calls: list[FakePrefill] = field(default_factory=list)
    released: list[HandoffKey] = field(default_factory=list)
    rebound: list[tuple[HandoffKey, Incarnation]] = field(default_factory=list)
    renewed: list[HandoffKey] = field(default_factory=list)
    lost: set[HandoffKey] = field(default_factory=set)
    rebind_error: WeirError | None = None
    aborted: list[RequestId] = field(default_factory=list)
    _called: asyncio.Event = field(default_factory=asyncio.Event)
    _renewed: asyncio.Event = field(default_factory=asyncio.Event)

    async def prefill(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...]) -> PrefillResult:
        call = FakePrefill(request, choices, asyncio.get_running_loop().create_future())
        self.calls.append(call)
        self._called.set()
        try:
            return await call.answer
        except asyncio.CancelledError:
            call.is_cancelled = True
            raise
        finally:
            call.ended.set()

    async def called(self, number: int) -> FakePrefill:
        """The call number `number`, from 0; waits for it."""
        while len(self.calls) <= number:
            self._called.clear()
            await self._called.wait()
        return self.calls[number]

    async def rebind(self, key: HandoffKey, decode_incarnation: Incarnation) -> None:
        if self.rebind_error is not None:
            raise self.rebind_error
        self.rebound.append((key, decode_incarnation))

    async def renew(self, keys: tuple[HandoffKey, ...]) -> tuple[HandoffKey, ...]:
        self.renewed.extend(keys)
        self._renewed.set()
        return tuple(key for key in keys if key in self.lost)

    async def renewals(self) -> None:
        """Wait for the next renewal."""
        self._renewed.clear()
        await self._renewed.wait()

    def release(self, keys: tuple[HandoffKey, ...], reason: str) -> None:
        self.released.extend(keys)

    async def abort(self, request_id: RequestId) -> int:
        self.aborted.append(request_id)
        return sum(call.request.request_id == request_id for call in self.calls)

    async def reset_prefix_cache(self) -> bool:
        return True
