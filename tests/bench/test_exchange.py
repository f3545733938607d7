"""Real sockets, a clock that only the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.fakes.completion_server import Answer, Call, CompletionServer
from tests.fakes.http_server import until
from weir.bench.exchange import Exchange, Exchanger
from weir.bench.failure import Failure
from weir.bench.record import RequestRecord
from weir.bench.request_plan import Endpoint, RequestPlan
from weir.bench.server_address import ServerAddress

BODY = {"prompt": [5, 6, 7], "max_tokens": 4}


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_exchange(awaited_chunks: int = 0) -> Exchange:
    plan = RequestPlan(kind="main", index=0, due_s=0.0, body=json.dumps(BODY).encode(), input_tokens=3, output_tokens=4)
    return Exchange(plan, awaited_chunks=awaited_chunks)


async def exchange_with(
    answer: Answer,
    *,
    timeout_s: float = 20.0,
    clock: Callable[[], float] | None = None,
    exchange: Exchange | None = None,
) -> RequestRecord:
    """One exchange with a server that answers so."""
    clock = clock or ManualClock()
    exchange = exchange or make_exchange()
    async with CompletionServer(answer) as server:
        address = ServerAddress.parse(server.url, "the key")
        await Exchanger(address, Endpoint.COMPLETIONS, timeout_s=timeout_s, clock=clock).perform(exchange)
    record = exchange.record("run", 90.0, clock())
    assert record is not None
    return record


async def failure_of(answer: Answer, **options: float) -> Failure:
    record = await exchange_with(answer, **options)
    assert record.failure is not None
    return record.failure


async def test_every_time_is_that_of_the_bytes() -> None:
    clock = ManualClock()
    exchange = make_exchange(awaited_chunks=3)

    async def answer(call: Call) -> None:
        call.start()
        for pieces, after_s in ((1, 0.5), (1, 0.25), (2, 1.0)):
            clock.now_s += after_s
            for _ in range(pieces):
                call.send_text("x")
            await until(lambda: clock.now_s in exchange.answer.chunk_times_s)
        assert exchange.reached.is_set()
        clock.now_s += 2.0
        call.end(completion_tokens=5)

    record = await exchange_with(answer, clock=clock, exchange=exchange)
    assert record.failure is None
    assert record.sent_s == 10.0  # from the start of the run
    assert record.ttft_s == 0.5
    assert record.itl_s == (0.25, 1.0, 0.0)
    assert record.e2el_s == 3.75
    assert (record.input_tokens, record.output_tokens, record.is_counted_by_server) == (3, 5, True)
    assert record.tpot_s == pytest.approx((3.75 - 0.5) / 4)


async def test_what_is_awaited_is_not_reached_before() -> None:
    exchange = make_exchange(awaited_chunks=2)
    exchange.feed(b'data: {"choices":[{"text":"a"}]}\n\n', 1.0)
    assert not exchange.reached.is_set()
    exchange.feed(b'data: {"choices":[{"text":"b"}]}\n\n', 2.0)
    assert exchange.reached.is_set()


async def test_without_usage_the_pieces_of_text_are_the_tokens() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("a")
        call.send_text("b", "stop")
        call.end()

    record = await exchange_with(answer)
    assert (record.output_tokens, record.is_counted_by_server) == (2, False)
    assert record.input_tokens == 3


async def test_the_request_is_what_was_planned() -> None:
    seen: list[Call] = []

    async def answer(call: Call) -> None:
        seen.append(call)
        call.start()
        call.send_text("a", "stop")
        call.end()

    await exchange_with(answer)
    (call,) = seen
    assert (call.method, call.path, call.body) == ("POST", "/v1/completions", BODY)
    assert call.headers["authorization"] == "Bearer the key"
    assert call.headers["host"].startswith("127.0.0.1:")


async def test_a_refusal_is_the_servers_own_words() -> None:
    async def answer(call: Call) -> None:
        call.send_json({"error": {"message": "max_tokens: is too long"}}, status=400)

    assert await failure_of(answer) == Failure(kind="http_400", message="max_tokens: is too long")


async def test_a_refusal_in_other_words_is_shown_as_it_is() -> None:
    async def answer(call: Call) -> None:
        call.send(b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>upstream</html>")
        call.writer.close()

    assert await failure_of(answer) == Failure(kind="http_502", message="<html>upstream</html>")


async def test_a_failure_in_the_stream() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("a")
        call.send_event({"error": {"message": "the worker is gone"}})

    record = await exchange_with(answer)
    assert record.failure == Failure(kind="stream_error", message="the worker is gone")
    assert record.output_tokens == 1


async def test_a_connection_that_breaks() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("a")
        call.writer.close()

    assert (await failure_of(answer)).kind == "disconnect"


async def test_a_server_that_hangs() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("a")
        await asyncio.Event().wait()

    failure = await failure_of(answer, timeout_s=0.05)
    assert failure == Failure(kind="timeout", message="no end within 0.05 s")


async def test_an_answer_that_is_no_stream() -> None:
    async def answer(call: Call) -> None:
        call.start(content_type="application/json")
        call.send_chunk(b'{"choices": [{"text": "all of it"}]}')
        call.send(b"0\r\n\r\n")

    failure = await failure_of(answer)
    assert failure == Failure(kind="protocol", message="the answer is application/json, no stream of events")


async def test_an_answer_without_text() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("", "stop")
        call.end(completion_tokens=1)

    assert (await failure_of(answer)).kind == "empty"


async def test_nobody_there() -> None:
    exchange = make_exchange(awaited_chunks=1)
    address = ServerAddress.parse("http://127.0.0.1:9")
    clock = ManualClock()
    await Exchanger(address, Endpoint.CHAT, timeout_s=5, clock=clock).perform(exchange)
    record = exchange.record("run", 90.0, clock())
    assert record is not None
    assert record.failure is not None
    assert record.failure.kind == "connect"
    assert (record.ttft_s, record.e2el_s, record.output_tokens) == (None, 0.0, 0)
    assert exchange.reached.is_set()  # nobody waits for its text


async def test_a_request_that_was_cut_keeps_what_it_had() -> None:
    exchange = make_exchange()

    async def answer(call: Call) -> None:
        call.start()
        call.send_text("a")
        await asyncio.Event().wait()

    clock = ManualClock()
    async with CompletionServer(answer) as server, asyncio.TaskGroup() as group:
        exchanger = Exchanger(ServerAddress.parse(server.url), Endpoint.COMPLETIONS, timeout_s=20, clock=clock)
        task = group.create_task(exchanger.perform(exchange))
        await until(lambda: bool(exchange.answer.chunk_times_s))
        clock.now_s += 3.0
        task.cancel()
    record = exchange.record("run", 90.0, clock())
    assert record is not None
    assert record.failure is not None
    assert (record.failure.kind, record.is_finished) == ("unfinished", False)
    assert (record.ttft_s, record.e2el_s, record.output_tokens) == (0.0, 3.0, 1)


async def test_a_request_that_was_never_begun_has_no_record() -> None:
    assert make_exchange().record("run", 90.0, 100.0) is None


@pytest.mark.parametrize("count", [-5, "x", 3.5, True, None])
def test_what_is_no_count_in_a_servers_usage_is_not_taken_for_one(count: object) -> None:
    exchange = make_exchange()
    exchange.sent_s, exchange.ended_s = 0.0, 1.0
    exchange.answer.usage = {
        "completion_tokens": count,
        "prompt_tokens": count,
        "prompt_tokens_details": {"cached_tokens": count},
    }
    record = exchange.record("main", 0.0, 1.0)
    assert record is not None
    assert (record.input_tokens, record.output_tokens, record.is_counted_by_server) == (3, 0, False)
    assert record.cached_tokens is None
