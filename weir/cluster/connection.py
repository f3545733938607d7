"""This process's link to Redis: bounded calls, at most two retries, and whether it can be trusted right now.

Every command runs in a task that the connection owns, and its caller waits on a future: a request that is cancelled
leaves its command to end by itself, so that no pooled connection is left with a reply that nobody reads. What passes
here must be idempotent, since a command whose connection breaks may have run: scripts that compare, never a bare INCR.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from weir.cluster import keys
from weir.cluster.link_state import LinkState
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.redis_client import (
    CLIENT_ERRORS,
    Command,
    RedisClient,
    is_link_error,
    is_login_error,
    is_timeout,
    is_unknown_script,
)
from weir.cluster.scripts import TOUCH_LINK, Script
from weir.core.deadline import Clock
from weir.core.errors import ConfigError, UnavailableError, WeirError
from weir.core.redis_url import RedisUrl

logger = logging.getLogger(__name__)

MIN_VERSION = (6, 2)
MAX_RETRIES = 2
RETRY_PAUSE_S = 0.02
MIN_PROBE_PAUSE_S = 0.05
MAX_PROBE_PAUSE_S = 1.0
LINK_TTL_MS = 60_000
RETRY_AFTER_S = 1.0
MAX_BLOCKING_READS = 4

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """One run of a script: all `keys` in one cluster slot."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[bytes | str | int, ...] = ()


class RedisConnection:
    """An async context manager; entering it never fails because Redis is away.

    Args:
        clock: of `link.up_since_s`.
        connect_timeout_s, call_timeout_s: bound each attempt; a time-out is not retried.
        max_connections: most sockets to one server, which is also the most commands in flight.
        check_interval_s: how often a link that is up is tested by a write.
    """

    def __init__(
        self,
        url: RedisUrl,
        *,
        clock: Clock = time.monotonic,
        connect_timeout_s: float = 0.5,
        call_timeout_s: float = 0.5,
        max_connections: int = 16,
        check_interval_s: float = 1.0,
    ) -> None:
        self.url = url
        self.link = LinkState(clock)
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s
        self._check_interval_s = check_interval_s
        self._max_connections = max_connections
        self._permits = asyncio.Semaphore(max_connections)
        self._link_key = keys.link(uuid.uuid4().hex)
        self._has_written_link_key = False
        self._exit = AsyncExitStack()
        self._tasks = OwnedTasks()

    @classmethod
    def from_url(cls, text: str, *, clock: Clock = time.monotonic, **bounds: Any) -> RedisConnection:
        """The forms are those of `redis_url`; `bounds` are the constructor's. Raises ConfigError for another form."""
        return cls(RedisUrl.parse(text), clock=clock, **bounds)

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    @property
    def up_since_s(self) -> float | None:
        return self.link.up_since_s

    async def __aenter__(self) -> Self:
        """Raises ConfigError if Redis answers but is too old or refuses the login."""
        async with AsyncExitStack() as stack:
            self._client = self._open_client(self._max_connections)
            stack.push_async_callback(self._client.close)
            # A blocking read waits for longer than any reply may take, so it has sockets of its own.
            self._reader = self._open_client(MAX_BLOCKING_READS)
            stack.push_async_callback(self._reader.close)
            await stack.enter_async_context(self._tasks)
            await self._probe()
            if not self.is_up:
                logger.warning("redis %s is away; going on without it", self.url.masked)
            self._tasks.start(self._watch())
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.link.mark_down()
        await self._exit.__aexit__(kind, error, traceback)

    async def execute(self, *command: Any) -> Any:
        """The reply to one idempotent command.

        Raises:
            UnavailableError: Redis is away, or refuses the command; at once when the link is known to be down.
        """
        return await self._submit(lambda: self._client.execute(command))

    async def run_script(self, script: Script, keys: Sequence[str], args: Sequence[bytes | str | int] = ()) -> Any:
        """The reply of a script. Raises UnavailableError as `execute` does."""
        (reply,) = await self.run_scripts((ScriptCall(script=script, keys=tuple(keys), args=tuple(args)),))
        if isinstance(reply, UnavailableError):
            raise reply
        return reply

    async def run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Replies in order, in one round trip to each server; a call that Redis refused has its UnavailableError there.

        Raises UnavailableError if Redis is away; then any of the calls may have run.
        """
        return await self._submit(lambda: self._run_scripts(calls))

    async def read_blocking(self, *command: Any, block_s: float) -> Any:
        """The reply to a command that blocks for up to `block_s` in Redis. Cancelling it closes its socket.

        Raises UnavailableError as `execute` does.
        """
        self._require_up()
        interruptions = self.link.num_interruptions
        try:
            async with asyncio.timeout(block_s + self._connect_timeout_s + self._call_timeout_s):
                return await self._reader.execute(command)
        except CLIENT_ERRORS as exc:
            if is_link_error(exc):
                await self._lose(exc, interruptions)
            raise self._translate(exc) from exc

    def _open_client(self, max_connections: int) -> RedisClient:
        return RedisClient(self.url, connect_timeout_s=self._connect_timeout_s, max_connections=max_connections)

    def _require_up(self) -> None:
        if not self.is_up:
            raise UnavailableError(f"redis {self.url.masked} is away", retry_after_s=RETRY_AFTER_S)

    async def _submit(self, operation: Callable[[], Awaitable[_Reply]]) -> _Reply:
        self._require_up()
        await self._permits.acquire()
        if not self.is_up:  # those before have found out
            self._permits.release()
            self._require_up()
        reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._tasks.start(self._answer(operation, reply)).add_done_callback(lambda _: self._finish(reply))
        return await reply

    async def _answer(self, operation: Callable[[], Awaitable[_Reply]], reply: asyncio.Future[_Reply]) -> None:
        try:
            value = await self._attempt(operation)
        except WeirError as exc:
            if not reply.done():
                reply.set_exception(exc)
        else:
            if not reply.done():
                reply.set_result(value)

    def _finish(self, reply: asyncio.Future[_Reply]) -> None:
        """Runs also for a command that was cancelled before its first step."""
        self._permits.release()
        if not reply.done():
            reply.set_exception(UnavailableError(f"the connection to redis {self.url.masked} is closed"))

    async def _attempt(self, operation: Callable[[], Awaitable[_Reply]]) -> _Reply:
        """One operation with its retries; reports to the link what came of it."""
        num_retries = 0
        while True:
            interruptions = self.link.num_interruptions
            try:
                async with asyncio.timeout(self._connect_timeout_s + self._call_timeout_s):
                    return await operation()
            except CLIENT_ERRORS as exc:
                if not is_link_error(exc):
                    raise self._translate(exc) from exc
                if is_timeout(exc) or num_retries == MAX_RETRIES:
                    await self._lose(exc, interruptions)
                    raise self._translate(exc) from exc
                # Also where the next attempt succeeds, what Redis knew in between may have gone.
                self.link.mark_interrupted()
                await self._client.drop_idle_connections()
            num_retries += 1
            await asyncio.sleep(RETRY_PAUSE_S * num_retries)

    async def _run_scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """By hash; those that the server has not seen are sent again as text, which it then knows."""
        replies = await self._client.execute_many([_command("EVALSHA", call, call.script.sha) for call in calls])
        unknown = [index for index, reply in enumerate(replies) if is_unknown_script(reply)]
        if unknown:
            texts = [_command("EVAL", calls[index], calls[index].script.text) for index in unknown]
            for index, reply in zip(unknown, await self._client.execute_many(texts), strict=True):
                replies[index] = reply
        return [self._translate(reply) if isinstance(reply, Exception) else reply for reply in replies]

    def _translate(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"redis {self.url.masked}: {_describe(error)}", retry_after_s=RETRY_AFTER_S)

    async def _lose(self, error: Exception, interruptions: int) -> None:
        """Mark the link down, unless it went down and came back while the failed command was in flight."""
        if self.is_up and self.link.num_interruptions == interruptions:
            logger.warning("redis %s is away: %s", self.url.masked, _describe(error))
            self.link.mark_down()
        await self._drop_connections()

    async def _drop_connections(self) -> None:
        await self._client.drop_idle_connections()
        await self._reader.drop_idle_connections()

    async def _watch(self) -> None:
        """Test the link: steadily while it is up, with growing pauses while it is down."""
        pause_s = MIN_PROBE_PAUSE_S
        fault = ""
        while True:
            if self.is_up:
                pause_s = MIN_PROBE_PAUSE_S
                try:
                    async with asyncio.timeout(self._check_interval_s):
                        while self.is_up:
                            await self.link.wait_for_change()
                except TimeoutError:
                    pass
            else:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, MAX_PROBE_PAUSE_S)
            try:
                await self._probe()
            except ConfigError as exc:
                if exc.message != fault:
                    logger.error("%s", exc.message)
                fault = exc.message

    async def _probe(self) -> None:
        """One exchange that needs a server which takes writes. Raises ConfigError if it is one we cannot use."""
        was_up = self.is_up
        interruptions = self.link.num_interruptions
        call = ScriptCall(script=TOUCH_LINK, keys=(self._link_key,), args=(LINK_TTL_MS,))
        try:
            async with asyncio.timeout(self._connect_timeout_s + self._call_timeout_s):
                if not was_up:
                    self._require_version(await self._client.server_version())
                (had_key,) = await self._run_scripts((call,))
                if isinstance(had_key, UnavailableError):
                    raise ConnectionError(had_key.message)
        except CLIENT_ERRORS as exc:
            await self._lose(exc, interruptions)
            if is_login_error(exc):
                raise ConfigError(f"redis {self.url.masked} refuses the login: {exc}", param="redis_url") from None
            return
        if was_up and self._has_written_link_key and not had_key:
            logger.warning("redis %s has lost its data", self.url.masked)
            self.link.mark_interrupted()
        self._has_written_link_key = True
        if not was_up:
            logger.info("redis %s is up", self.url.masked)
            self.link.mark_up()

    def _require_version(self, version: str) -> None:
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if numbers < MIN_VERSION:
            needed = ".".join(map(str, MIN_VERSION))
            raise ConfigError(
                f"redis {self.url.masked} is version {version}; Weir needs Redis or Valkey {needed} or later",
                param="redis_url",
            )


def _describe(error: Exception) -> str:
    return "no answer in time" if is_timeout(error) else str(error) or type(error).__name__


def _command(name: str, call: ScriptCall, script: str) -> Command:
    return (name, script, len(call.keys), *call.keys, *call.args)
