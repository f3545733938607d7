"""Whole measurements of a scripted server, over real sockets."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT
from tests.fakes.completion_server import MODEL, Call, CompletionServer, answer_in_full
from tests.fakes.http_server import until
from weir.bench.benchmark import Benchmark, run_benchmark
from weir.bench.corpus import Corpus
from weir.bench.exchange import Exchange
from weir.bench.lengths import Lengths
from weir.bench.prompt_maker import PromptKind
from weir.bench.request_plan import Endpoint, Sampling
from weir.bench.result import BenchResult
from weir.bench.server_address import ServerAddress
from weir.bench.workload import PRESETS, Burst, Workload
from weir.core.errors import UnavailableError

SMALL = Workload(
    name="small", input_tokens=Lengths.fixed(24), output_tokens=Lengths.fixed(5), num_requests=8, concurrency=3
)


@dataclass
class Watched:
    """What was told."""

    runs: list[tuple[str, int]] = field(default_factory=list)
    num_ended: int = 0

    def run_begins(self, name: str, num_requests: int) -> None:
        self.runs.append((name, num_requests))

    def request_ended(self, exchange: Exchange) -> None:
        self.num_ended += 1


def benchmark_of(server: CompletionServer, workload: Workload = SMALL, **changes: Any) -> Benchmark:
    return Benchmark(
        **{
            "address": ServerAddress.parse(server.url),
            "workload": workload,
            "corpus": Corpus.load(None),
            "salt": "s",
            **changes,
        }
    )


def document_of(result: BenchResult) -> dict[str, Any]:
    return result.to_dict(config={}, versions={})


async def measure(server: CompletionServer, workload: Workload = SMALL, **changes: Any) -> BenchResult:
    return await run_benchmark(benchmark_of(server, workload, **changes), Watched())


async def test_a_closed_loop_is_measured_as_asked() -> None:
    async def answer(call: Call) -> None:
        await until(lambda: server.num_running == 3 or len(server.calls) in (1, 9))
        await answer_in_full(call)

    watched = Watched()
    async with CompletionServer(answer) as server:
        result = await run_benchmark(benchmark_of(server), watched)
        assert server.max_running == 3
        assert len(server.calls) == 9  # one to warm up
        prompts = [tuple(call.body["prompt"]) for call in server.calls]
        assert {len(prompt) for prompt in prompts} == {24}
        assert len({prompt[0] for prompt in prompts}) == 9
        (body,) = {frozenset((call.body | {"prompt": 0, "stream_options": 0}).items()) for call in server.calls}
        assert dict(body) == {
            "model": MODEL,
            "prompt": 0,
            "max_tokens": 5,
            "temperature": 0.0,
            "stream": True,
            "stream_options": 0,
            "ignore_eos": True,
        }
    assert watched.runs == [("main", 8)]
    assert watched.num_ended == 8
    assert (result.summary.num_succeeded, result.summary.output_tokens, result.summary.input_tokens) == (8, 40, 192)
    assert (result.stopped_by, result.notes, result.model, result.server) == (None, (), MODEL, "version 1.2.3")


async def test_text_prompts_have_the_same_counts() -> None:
    async with CompletionServer() as server:
        result = await measure(server, prompt_kind=PromptKind.TEXT)
        assert all(isinstance(call.body["prompt"], str) for call in server.calls)
    assert result.notes == ()
    assert {record.input_tokens for record in result.runs[0].records} == {24}


async def test_a_chat_is_one_message_and_sampling_reaches_the_server() -> None:
    async with CompletionServer() as server:
        result = await measure(
            server,
            endpoint=Endpoint.CHAT,
            prompt_kind=PromptKind.TEXT,
            sampling=Sampling(temperature=0.5, seed=7, ignore_eos=False),
            num_warmups=0,
        )
        assert {call.path for call in server.calls} == {"/v1/chat/completions"}
        assert {call.body["messages"][0]["role"] for call in server.calls} == {"user"}
        assert {call.body["temperature"] for call in server.calls} == {0.5}
        assert {call.body["seed"] for call in server.calls} == set(range(7, 15))
        assert not any("ignore_eos" in call.body for call in server.calls)
    assert (result.summary.num_succeeded, result.notes) == (8, ())


async def test_a_shared_prefix_is_the_runs_own() -> None:
    workload = replace(SMALL, shared_prefix_tokens=16)
    async with CompletionServer() as server:
        await measure(server, workload, num_warmups=1)
        warmup, *measured = [tuple(call.body["prompt"]) for call in server.calls]
    assert {len(prompt) for prompt in (warmup, *measured)} == {40}
    assert len({prompt[:16] for prompt in measured}) == 1
    assert len({prompt[16] for prompt in measured}) == len(measured)
    assert warmup[0] != measured[0][0]


async def test_a_sweep_has_a_row_for_each_rate() -> None:
    workload = replace(SMALL, concurrency=None, request_rates=(400.0, math.inf), num_requests=6)
    async with CompletionServer() as server:
        result = await measure(server, workload)
    document = document_of(result)
    assert [row["request_rate"] for row in document["sweep"]] == [400.0, None]
    assert [row["num_succeeded"] for row in document["sweep"]] == [6, 6]
    assert {request["run"] for request in document["requests"]} == {"rate=400", "rate=inf"}
    assert document["num_requests"] == 12
    assert document["duration_s"] == pytest.approx(sum(row["duration_s"] for row in document["sweep"]))
    first = [record.due_s for record in result.runs[0].records]
    assert first == sorted(first)
    assert first[-1] > 0
    assert all(record.sent_s >= record.due_s for record in result.runs[0].records)


async def test_w5_measures_streams_alone_and_beside_a_burst() -> None:
    burst = Burst(num_requests=2, input_tokens=90, output_tokens=2, after_chunks=4)
    async with CompletionServer() as server:
        result = await measure(server, replace(PRESETS["w5"], output_tokens=Lengths.fixed(12), burst=burst))
    document = document_of(result)
    assert document["failures"] == {}
    assert document["alone"]["num_succeeded"] == document["burst"]["num_succeeded"] == 4
    assert document["alone"]["num_itl_samples"] == 4 * 11
    assert document["burst"]["num_burst_requests"] == 2
    assert document["burst"]["ttft_p50_s"] > 0
    assert document["burst"]["sent_s"] < document["burst"]["last_first_token_s"]
    assert [request["kind"] for request in document["requests"]] == ["steady"] * 8 + ["burst"] * 2
    assert [request["run"] for request in document["requests"]] == ["alone"] * 4 + ["burst"] * 6


async def test_a_burst_waits_until_every_steady_stream_speaks() -> None:
    workload = replace(PRESETS["w5"], burst=Burst(num_requests=1, input_tokens=90, output_tokens=1, after_chunks=2))
    workload = replace(workload, output_tokens=Lengths.fixed(4))
    spoken: list[str] = []
    go_on = asyncio.Event()

    async def answer(call: Call) -> None:
        if len(call.body["prompt"]) == 90:
            spoken.append("burst")
            go_on.set()
            await answer_in_full(call)
            return
        call.start()
        call.send_text("a")
        call.send_text("b")
        spoken.append("steady")
        if spoken.count("steady") > 5:  # of the second run
            await go_on.wait()
        call.send_text("c", "length")
        call.end(completion_tokens=4)

    async with CompletionServer(answer) as server:
        result = await measure(server, workload)
    assert result.summary.failures == {}
    assert spoken == ["steady"] * 9 + ["burst"]  # a warm-up, four alone, four before the burst
    found = result.interference
    assert found is not None
    assert found.burst_itl_s is not None
    assert found.burst_itl_s.count >= 4  # the gap of each stream that waited for the burst
    assert found.num_ended_early == 0


async def test_failures_are_counted_by_kind_and_the_rest_is_measured() -> None:
    async def answer(call: Call) -> None:
        match len(server.calls):
            case 3:
                call.send_json({"error": {"message": "busy"}}, status=429)
            case 4:
                call.writer.close()
            case 5:
                call.start()
                call.send_event({"error": {"message": "gone"}})
            case _:
                await answer_in_full(call)

    async with CompletionServer(answer) as server:
        result = await measure(server)
    assert result.summary.failures == {"http_429": 1, "disconnect": 1, "stream_error": 1}
    assert (result.summary.num_succeeded, result.summary.num_failed) == (5, 3)
    errors = [request["error"] for request in document_of(result)["requests"] if request["error"]]
    assert {"kind": "http_429", "message": "busy"} in errors


async def test_a_cancellation_ends_it_with_what_is_known() -> None:
    async def answer(call: Call) -> None:
        if len(server.calls) <= 5:
            await answer_in_full(call)
            return
        call.start()
        call.send_text("a")
        await asyncio.Event().wait()

    watched = Watched()
    async with CompletionServer(answer) as server:
        results: list[BenchResult] = []

        async def run() -> None:
            results.append(await run_benchmark(benchmark_of(server), watched))
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

        async with asyncio.TaskGroup() as group:
            task = group.create_task(run())
            await until(lambda: len(server.calls) == 8)
            task.cancel()
    (result,) = results
    document = document_of(result)
    assert (document["complete"], document["stopped_by"]) == (False, "interrupt")
    assert (document["num_requests"], document["num_succeeded"], document["num_unfinished"]) == (7, 4, 3)
    assert document["num_failed"] == 0
    assert [request["error"]["kind"] for request in document["requests"] if request["error"]] == ["unfinished"] * 3


async def test_a_measurement_may_be_limited_in_time() -> None:
    async with CompletionServer() as server:
        result = await measure(server, replace(SMALL, concurrency=1), max_duration_s=1e-9)
    document = document_of(result)
    assert (document["complete"], document["stopped_by"], document["num_requests"]) == (False, "max_duration", 0)
    assert (document["ttft_s"], document["requests"]) == (None, [])


async def test_a_warm_up_that_fails_is_the_end() -> None:
    async def answer(call: Call) -> None:
        call.send_json({"error": {"message": "model: unknown"}}, status=404)

    async with CompletionServer(answer) as server:
        with pytest.raises(UnavailableError, match=r"^the warm-up failed \(http_404\): model: unknown$"):
            await measure(server)
        assert len(server.calls) == 1


async def test_what_the_server_counts_otherwise_is_a_note() -> None:
    async def answer(call: Call) -> None:
        call.start()
        call.send_text("all", "length")
        call.send_event({"choices": [], "usage": {"prompt_tokens": 25, "completion_tokens": 3}})
        call.end()

    async with CompletionServer(answer) as server:
        result = await measure(server)
    assert list(result.notes) == [
        "in 8 of 8 requests the server counts other prompt tokens than were made: +1",
        "8 of 8 answers are shorter than asked for, 3.0 tokens on average",
        "3.00 tokens came in a piece of text, on average: a gap (ITL) is one between pieces",
    ]


async def test_the_page_names_every_field_of_the_json() -> None:
    page = (ROOT / "docs/benchmarking.md").read_text().partition("\n## JSON\n")[2]
    named = set(re.findall(r"[`\"]([a-z0-9_]+)[`\"]", page))
    sweep = replace(SMALL, concurrency=None, request_rates=(math.inf, math.inf))
    burst = replace(PRESETS["w5"], burst=Burst(num_requests=1, input_tokens=9, output_tokens=1))
    async with CompletionServer() as server:
        documents = [document_of(await measure(server, workload)) for workload in (sweep, burst)]
    fields: set[str] = set()
    for document in documents:
        for part in (document, *document["requests"], *document.get("sweep", ()), document["ttft_s"]):
            fields |= part.keys()
        for run in ("alone", "burst"):
            fields |= document.get(run, {}).keys()
    assert fields - named == set()
