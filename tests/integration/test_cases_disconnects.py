"""Rows S17 and S18 of the cases on the real model through both services: a client that leaves ends its work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.integration.real_cluster import CHAT, COMPLETIONS, HI, HI_ANSWER, KV_BYTES_PER_TOKEN, RealCluster, until

STOP_S = 2.0
LONG = {"messages": HI, "max_tokens": 2000, "ignore_eos": True}


def num_running(real: RealCluster) -> float:
    return sum(worker.metrics()["vllm:num_requests_running"] for worker in real.workers.values())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
async def test_s17_the_engines_stop_within_two_seconds(real: RealCluster, stream: bool, way: str) -> None:
    _, writer = await real.begin(CHAT, **LONG, stream=stream)
    await until(lambda: num_running(real) > 0, lambda: "the decode worker runs it", 20.0)
    if way == "close":
        writer.close()
    elif way == "reset":
        writer.transport.abort()
    else:
        writer.write_eof()
    await real.at_rest(STOP_S)
    if way == "half-close":
        writer.close()


async def test_s18_prompts_whose_clients_have_left_delay_nobody(real: RealCluster) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": [260 + index] * 6000, "max_tokens": 1, "stream": True} for index in range(10)
    ]
    before = real.workers["decode"].metrics()["weir_handoff_bytes_total"]
    connections = [await real.begin(COMPLETIONS, **body) for body in bodies]
    prefill = real.workers["prefill"]
    await until(lambda: prefill.metrics()["weir_prefill_queued_tokens"] > 0, lambda: "prefill has begun", 20.0)
    for _, writer in connections:
        writer.close()
    left_s = time.monotonic()
    answer = await real.chat()
    assert answer["choices"][0]["message"]["content"] == HI_ANSWER
    await real.at_rest()
    assert time.monotonic() - left_s < 10.0, "60,000 tokens take minutes"
    moved = real.workers["decode"].metrics()["weir_handoff_bytes_total"] - before
    assert moved < 6000 * KV_BYTES_PER_TOKEN, "not even one of them is handed over"


async def test_one_that_leaves_disturbs_no_other(real: RealCluster) -> None:
    body = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "ignore_eos": True}
    alone = await real.stream(COMPLETIONS, **body)
    async with asyncio.TaskGroup() as group:
        staying = [group.create_task(real.stream(COMPLETIONS, **body)) for _ in range(3)]
        for _ in range(5):
            reader, writer = await real.begin(CHAT, **LONG, stream=True)
            await reader.readuntil(b"data: ")
            writer.transport.abort()
    assert {task.result().text() for task in staying} == {alone.text()}
