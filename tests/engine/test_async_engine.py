"""AsyncEngine: many callers, one thread, and nobody left waiting whatever happens to it."""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.fakes.model_runner import FakeModelRunner, expected_output, make_config, make_request
from weir.core.deadline import Deadline
from weir.core.errors import (
    ConflictError,
    ContextLengthError,
    DeadlineExceededError,
    HopFailedError,
    ModelLoadError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)
from weir.core.request import FinishReason, FirstToken, RequestId, SequenceRequest
from weir.engine.async_engine import AsyncEngine, Denial, Grant
from weir.engine.batch import Batch
from weir.engine.config import EngineConfig
from weir.engine.sequence import PrefillChoice
from weir.engine.token_stream import TokenStream

PROMPT = tuple(range(1, 38))


class Gate:
    """Stops the engine's thread before it computes, until opened. `arrived` is set each time it stands there."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.arrived = asyncio.Event()
        self.permits = threading.Semaphore(0)

    def __call__(self, batch: Batch) -> None:
        self.loop.call_soon_threadsafe(self.arrived.set)
        self.permits.acquire()

    async def wait(self) -> None:
        """Until the thread stands before a step."""
        await self.arrived.wait()
        self.arrived.clear()

    def open(self, num_steps: int = 10_000) -> None:
        self.permits.release(num_steps)


@contextmanager
def stop_before_steps(started: Started) -> Iterator[Gate]:
    started.runner.before_execute = gate = Gate()
    try:
        yield gate
    finally:
        gate.open()


class Started:
    """An engine over the fake model, and the fake."""

    def __init__(self, engine: AsyncEngine, runner: FakeModelRunner) -> None:
        self.engine = engine
        self.runner = runner

    async def is_clean(self) -> bool:
        await self.engine.check_integrity()
        stats = self.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


@asynccontextmanager
async def start(**settings: object) -> AsyncIterator[Started]:
    runners: list[FakeModelRunner] = []

    def load(config: EngineConfig) -> FakeModelRunner:
        runners.append(FakeModelRunner(config))
        return runners[0]

    async with asyncio.timeout(20), AsyncEngine(make_config(**settings), load_runner=load) as engine:
        yield Started(engine, runners[0])


async def read_all(stream: TokenStream, num_sequences: int) -> dict[str, list[int]]:
    """Tokens of each sequence, until `num_sequences` have finished."""
    tokens: dict[str, list[int]] = {}
    while num_sequences:
        for news in await stream.read():
            assert news.error is None
            assert news.delta is not None
            known = tokens.setdefault(news.sequence_id, [])
            assert news.delta.first_index == len(known)
            known.extend(news.delta.token_ids)
            num_sequences -= news.delta.finish_reason is not None
    return tokens


async def test_many_sequences_on_one_stream_equal_their_solo_runs() -> None:
    async with start() as started:
        stream = started.engine.open_stream()
        requests = [
            make_request(f"s{i}", PROMPT[i % 7 :], max_tokens=12, temperature=float(i % 2), seed=i) for i in range(30)
        ]
        for request in requests:
            await started.engine.submit(request, stream)
        tokens = await read_all(stream, len(requests))
        assert tokens == {request.sequence_id: expected_output(request)[0] for request in requests}
        assert await started.is_clean()
        assert sum(started.engine.take_iteration_tokens()) > 0


async def test_engine_that_only_waits_for_the_disk_goes_on_by_itself() -> None:
    block_bytes = 4 * 8
    tiers = {"host_kv_cache_bytes": 100 * block_bytes, "disk_kv_cache_bytes": 400 * block_bytes}
    async with start(num_blocks=40, disk_kv_cache_dir=Path(tempfile.gettempdir()), **tiers) as started:
        cold = started.engine._thread.engine._cache.cold
        assert cold is not None
        cold.token_s = lambda: math.inf  # this disk is always worth its while
        for index in range(24):
            prompt = [index % 12, *[token % 40 for token in range(90)]]
            request = make_request(f"s{index}", prompt, max_tokens=4)
            stream = started.engine.open_stream()
            await started.engine.submit(request, stream)
            assert await read_all(stream, 1) == {request.sequence_id: expected_output(request)[0]}
        stats = started.engine.stats()
        assert stats.disk.num_hit_tokens > 0
        assert await started.is_clean()


async def test_facts_of_the_model_are_there_once_it_is_loaded() -> None:
    async with start(num_blocks=9) as started:
        engine = started.engine
        assert (engine.num_blocks, engine.max_model_len, engine.layout.block_size) == (9, 4096, 4)
        assert engine.fingerprint == engine.layout.fingerprint(engine.card.weights_hash)
        assert engine.stats().total_blocks == 9


async def test_broken_checkpoint_comes_out_of_entering() -> None:
    def load(config: EngineConfig) -> FakeModelRunner:
        raise ModelLoadError("model-00002.safetensors: missing")

    with pytest.raises(ModelLoadError, match="model-00002"):
        async with AsyncEngine(make_config(), load_runner=load):
            raise AssertionError("entered a broken engine")


async def test_loading_does_not_block_the_loop_and_can_be_cancelled() -> None:
    may_load, is_done = threading.Event(), threading.Event()

    def load(config: EngineConfig) -> FakeModelRunner:
        may_load.wait()
        is_done.set()
        return FakeModelRunner(config)

    engine = AsyncEngine(make_config(), load_runner=load)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.__aenter__()
    may_load.set()
    await asyncio.to_thread(is_done.wait)
    await asyncio.to_thread(engine._thread._thread.join)


async def test_refusals_reach_the_caller_and_leave_nothing() -> None:
    async with start() as started:
        stream = started.engine.open_stream()
        with pytest.raises(ContextLengthError):
            await started.engine.submit(make_request("s", [1], max_tokens=5000), stream)
        with pytest.raises(ContextLengthError):
            await started.engine.claim(make_request("s", [1], max_tokens=5000), stream)
        with pytest.raises(ContextLengthError):
            await started.engine.prefill(
                make_request("s", [1], max_tokens=5000), (PrefillChoice(choice_index=0, hold_id="h"),)
            )
        request = make_request("s", PROMPT, max_tokens=3)
        with stop_before_steps(started) as gate:
            await started.engine.submit(request, stream)
            await gate.wait()
            with pytest.raises(ConflictError):
                await started.engine.submit(request, stream)
            gate.open()
        assert await read_all(stream, 1) == {"s": expected_output(request)[0]}
        assert await started.is_clean()


FOREVER = 3000
"""Tokens that no engine has made before the loop's thread does its next thing."""


class TestAbort:
    async def test_is_final_at_once_even_for_tokens_on_their_way(self) -> None:
        async with start() as started:
            with stop_before_steps(started) as gate:
                stream = started.engine.open_stream()
                await started.engine.submit(make_request("s", PROMPT, max_tokens=50), stream)
                other = make_request("other", PROMPT, max_tokens=4)
                await gate.wait()
                started.engine.abort("s")
                gate.open()
                await started.engine.submit(other, stream)
                assert await read_all(stream, 1) == {"other": expected_output(other)[0]}
                assert await started.is_clean()

    async def test_same_id_may_be_used_again_at_once(self) -> None:
        async with start(num_blocks=1024) as started:
            stream = started.engine.open_stream()
            first = make_request("s", PROMPT, max_tokens=FOREVER)
            second = make_request("s", PROMPT[5:], max_tokens=6, temperature=1.0)
            await started.engine.submit(first, stream)
            started.engine.abort("s")
            await started.engine.submit(second, stream)
            assert await read_all(stream, 1) == {"s": expected_output(second)[0]}

    async def test_by_request_ends_all_its_sequences(self) -> None:
        async with start(num_blocks=2048) as started:
            stream = started.engine.open_stream()
            for name, request_id, max_tokens in (("a", "same", FOREVER), ("b", "same", FOREVER), ("c", "other", 8)):
                request = make_request(name, PROMPT, max_tokens=max_tokens, request_id=RequestId(request_id))
                await started.engine.submit(request, stream)
            assert started.engine.abort_request(RequestId("same")) == 2
            assert started.engine.abort_request(RequestId("same")) == 0
            assert set(await read_all(stream, 1)) == {"c"}
            assert await started.is_clean()

    async def test_closing_a_stream_ends_its_sequences(self) -> None:
        async with start() as started:
            stream, other = started.engine.open_stream(), started.engine.open_stream()
            for name in ("a", "b"):
                await started.engine.submit(make_request(name, PROMPT, max_tokens=200), stream)
            kept = make_request("kept", PROMPT, max_tokens=5)
            await started.engine.submit(kept, other)
            stream.close()
            assert await read_all(other, 1) == {"kept": expected_output(kept)[0]}
            assert await started.is_clean()
            with pytest.raises(RequestCancelledError):
                await started.engine.submit(make_request("late", PROMPT), stream)

    async def test_unknown_and_ended_ids_are_ignored(self) -> None:
        async with start() as started:
            stream = started.engine.open_stream()
            await started.engine.submit(make_request("s", PROMPT, max_tokens=1), stream)
            await read_all(stream, 1)
            started.engine.abort("s")
            started.engine.abort("never")
            assert await started.is_clean()

    async def test_caller_cancelled_while_it_submits_leaves_nothing(self) -> None:
        async with start() as started:
            with stop_before_steps(started) as gate:
                stream = started.engine.open_stream()
                blocker = make_request("blocker", PROMPT, max_tokens=2)
                await started.engine.submit(blocker, stream)
                await gate.wait()  # commands are not answered now
                calls: list[Callable[[SequenceRequest], Awaitable[object]]] = [
                    lambda request: started.engine.submit(request, stream),
                    lambda request: started.engine.claim(request, stream),
                    lambda request: started.engine.prefill(request, (PrefillChoice(choice_index=0, hold_id="h"),)),
                ]
                for index, call in enumerate(calls):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await call(make_request(f"s{index}", PROMPT, max_tokens=50))
                gate.open()
                assert await read_all(stream, 1) == {"blocker": expected_output(blocker)[0]}
                assert await started.is_clean()


class TestPrefill:
    async def test_progress_then_first_tokens(self) -> None:
        async with start(max_num_batched_tokens=8) as started:
            request = make_request("p", PROMPT, max_tokens=4, temperature=1.0, seed=3)
            choices = tuple(PrefillChoice(choice_index=index, hold_id=f"h{index}") for index in (0, 1))
            async with aclosing(await started.engine.prefill(request, choices)) as run:
                heard = [progress async for progress in run]
            counts = [progress.num_computed_tokens for progress in heard]
            assert counts == sorted(set(counts))
            assert counts[-1] == 37
            assert heard[-1].first_tokens is not None
            assert [token.choice_index for token in heard[-1].first_tokens] == [0, 1]
            assert started.engine.stats().held_blocks == 10
            for choice in choices:
                started.engine.release_hold(choice.hold_id)
                started.engine.release_hold(choice.hold_id)
            assert await started.is_clean()

    async def test_leaving_early_ends_the_computation_at_the_next_step(self) -> None:
        async with start(max_num_batched_tokens=8) as started:
            with stop_before_steps(started) as gate:
                choice = PrefillChoice(choice_index=0, hold_id="h")
                async with aclosing(
                    await started.engine.prefill(make_request("p", PROMPT, max_tokens=9), (choice,))
                ) as run:
                    await gate.wait()
                    gate.open(1)
                    assert (await anext(run)).num_computed_tokens == 8
                    await gate.wait()
                gate.open()
                started.engine.release_hold("h")
                assert await started.is_clean()
                assert started.runner.steps == [(1, 8), (1, 8)]

    async def test_abort_by_id_ends_the_run_with_an_error(self) -> None:
        async with start(max_num_batched_tokens=8) as started:
            choice = PrefillChoice(choice_index=0, hold_id="h")
            with stop_before_steps(started) as gate:
                run = await started.engine.prefill(make_request("p", PROMPT, max_tokens=9), (choice,))
                await gate.wait()
                started.engine.abort("p")
                gate.open()
                with pytest.raises(RequestCancelledError):
                    async for _ in run:
                        pass
            started.engine.release_hold("h")
            assert await started.is_clean()

    async def test_deadline_ends_the_run(self) -> None:
        async with start() as started:
            choice = PrefillChoice(choice_index=0, hold_id="h")
            run = await started.engine.prefill(make_request("p", PROMPT, deadline=Deadline(0.0)), (choice,))
            with pytest.raises(DeadlineExceededError):
                await anext(run)


def never() -> None:
    raise AssertionError("nothing is copied")


class TestHandoff:
    async def test_blocks_moved_between_two_engines(self) -> None:
        async with start() as source, start(block_size=8) as target:
            request = make_request("s", PROMPT, max_tokens=10, temperature=0.9, seed=8)
            run = await source.engine.prefill(request, (PrefillChoice(choice_index=0, hold_id="h"),))
            *_, last = [progress async for progress in run]
            assert last.first_tokens is not None
            stream = target.engine.open_stream()
            assert await target.engine.claim(request, stream) == Grant(num_cached_tokens=0, num_claimed_blocks=5)
            destination = await target.engine.allocate_claimed("s")
            for index, block_id in enumerate(last.block_ids):
                count = min(4, len(PROMPT) - 4 * index)
                read = source.engine.blocks.read(block_id, 0, source.engine.layout.block_bytes, never)
                assert read.payload is not None
                written = asyncio.Event()
                target.engine.blocks.write_tokens(destination.block_ids, 4 * index, count, read.payload, 4, written.set)
                assert written.is_set()
                read.release()
            await target.engine.activate("s", last.first_tokens[0], last.num_cached_tokens)
            source.engine.release_hold("h")
            assert await read_all(stream, 1) == {"s": expected_output(request)[0]}
            assert await source.is_clean()
            assert await target.is_clean()

    async def test_denied_claim_leaves_nothing(self) -> None:
        async with start(num_blocks=12) as started:
            stream = started.engine.open_stream()
            assert isinstance(await started.engine.claim(make_request("a", PROMPT, max_tokens=4), stream), Grant)
            assert isinstance(await started.engine.claim(make_request("b", PROMPT, max_tokens=4), stream), Denial)
            await started.engine.release_claim("a")
            await started.engine.release_claim("a")
            assert isinstance(await started.engine.claim(make_request("b", PROMPT, max_tokens=4), stream), Grant)
            await started.engine.release_claim("b")
            assert await started.is_clean()

    async def test_stream_closed_while_blocks_are_written(self) -> None:
        async with start() as started:
            stream = started.engine.open_stream()
            await started.engine.claim(make_request("s", PROMPT), stream)
            await started.engine.allocate_claimed("s")
            stream.close()
            assert not await started.is_clean()
            with pytest.raises(RequestCancelledError):
                await started.engine.activate("s", FirstToken(choice_index=0, token_id=1), 0)
            assert await started.is_clean()

    async def test_activation_of_nothing_is_an_error(self) -> None:
        async with start() as started:
            with pytest.raises(RequestNotFoundError):
                await started.engine.activate("s", FirstToken(choice_index=0, token_id=1), 0)


class TestDeadline:
    async def test_idle_engine_wakes_for_it(self) -> None:
        async with start() as started:
            stream = started.engine.open_stream()
            await started.engine.claim(make_request("s", PROMPT, deadline=Deadline.after(0.05)), stream)
            (news,) = await stream.read()
            assert isinstance(news.error, DeadlineExceededError)
            assert await started.is_clean()


class TestFailure:
    async def test_engine_that_breaks_ends_every_sequence_and_call(self) -> None:
        async with start(num_blocks=12) as started:
            engine, stream = started.engine, started.engine.open_stream()
            assert isinstance(await engine.claim(make_request("claimed", PROMPT, max_tokens=4), stream), Grant)
            await engine.submit(make_request("waiting", PROMPT, max_tokens=4), stream)
            run = await engine.prefill(
                make_request("p", PROMPT, max_tokens=4), (PrefillChoice(choice_index=0, hold_id="h"),)
            )
            await engine.kv_events()
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(_outcome(engine.kv_events()))
                await asyncio.sleep(0)
                engine._thread.post(lambda engine: engine._cache.pool.acquire([0]))  # a reference of nobody
                with pytest.raises(AssertionError, match="block"):
                    await engine.check_integrity()
            assert isinstance(reader.result(), HopFailedError)
            with pytest.raises(HopFailedError):
                await anext(run)
            heard = {news.sequence_id: news.error for news in await stream.read()}
            assert set(heard) == {"claimed", "waiting"}
            assert all(isinstance(error, HopFailedError) for error in heard.values())
            assert "block" in (engine.stats().failure or "")
            for call in (
                engine.check_integrity(),
                engine.submit(make_request("b", PROMPT), stream),
                engine.kv_events(),
                engine.allocate_claimed("claimed"),
            ):
                with pytest.raises(UnavailableError, match="cannot go on"):
                    await call
            engine.abort("claimed")
            engine.release_hold("h")
            await engine.release_claim("claimed")

    async def test_model_that_computes_nothing_ends_the_engine(self) -> None:
        async with start() as started:

            def refuse(batch: Batch) -> None:
                raise RuntimeError("device lost")

            started.runner.before_execute = refuse
            stream = started.engine.open_stream()
            for name in ("a", "b", "c"):
                await started.engine.submit(make_request(name, PROMPT), stream)
                (news,) = await stream.read()
                assert isinstance(news.error, HopFailedError)
            with pytest.raises(UnavailableError, match="nothing could be computed"):
                await started.engine.submit(make_request("d", PROMPT), stream)

    async def test_stopping_ends_whoever_still_waits(self) -> None:
        async with start() as started:
            with stop_before_steps(started) as gate:
                engine, stream = started.engine, started.engine.open_stream()
                await engine.submit(make_request("a", PROMPT, max_tokens=100), stream)
                await gate.wait()
                gate.open()
        (news,) = await stream.read()
        assert isinstance(news.error, UnavailableError)
        with pytest.raises(UnavailableError, match="stopped"):
            await engine.submit(make_request("b", PROMPT), stream)
        engine.abort("a")


class TestKvEvents:
    async def test_first_the_content_then_what_changes(self) -> None:
        async with start() as started:
            stream = started.engine.open_stream()
            await started.engine.submit(make_request("a", PROMPT[:9], max_tokens=1), stream)
            await read_all(stream, 1)
            events = await started.engine.kv_events()
            assert events.cleared
            assert set(events.stored) == set(await started.engine.kv_snapshot())
            assert len(events.stored) == 2
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(started.engine.kv_events())
                await started.engine.submit(make_request("b", PROMPT[:13], max_tokens=1), stream)
                await read_all(stream, 1)
            assert not reader.result().cleared
            assert len(reader.result().stored) == 1

    async def test_reader_that_was_cancelled_loses_nothing(self) -> None:
        async with start() as started:
            await started.engine.kv_events()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await started.engine.kv_events()
            stream = started.engine.open_stream()
            await started.engine.submit(make_request("a", PROMPT[:9], max_tokens=1), stream)
            await read_all(stream, 1)
            events = await started.engine.kv_events()
            assert len(events.stored) == 2

    async def test_reset_clears(self) -> None:
        async with start() as started:
            stream = started.engine.open_stream()
            await started.engine.submit(make_request("a", PROMPT[:9], max_tokens=1), stream)
            await read_all(stream, 1)
            await started.engine.kv_events()
            assert await started.engine.reset_prefix_cache()
            events = await started.engine.kv_events()
            assert (events.cleared, events.stored) == (True, ())


async def test_slow_reader_gets_everything_in_one_piece() -> None:
    async with start() as started:
        stream = started.engine.open_stream()
        request = make_request("s", PROMPT, max_tokens=30)
        await started.engine.submit(request, stream)
        other = started.engine.open_stream()
        await started.engine.submit(make_request("t", PROMPT[1:], max_tokens=60), other)
        await read_all(other, 1)
        (news,) = await stream.read()
        assert news.delta is not None
        assert list(news.delta.token_ids) == expected_output(request)[0]
        assert news.delta.finish_reason is FinishReason.LENGTH


async def _outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except (HopFailedError, UnavailableError) as error:
        return error
