"""One cluster with the default model for every case that wants the whole system, and what each must leave behind.

`PROBE` of the cases: afterwards the short chat has its answer, and nothing runs, waits, is held or uses a block.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.served_cluster import ServedCluster, ServedProcess, http_get, leftovers

HI = ({"role": "user", "content": "hi"},)
HI_ANSWER = "Hello there! How can I assist you today?"
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2
"""Keys and values of 30 layers and 3 heads of 64, in float16."""
KEEP_ALIVE_S = 0.2
REST_S = 10.0
POLL_S = 0.02

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Streamed:
    """A streamed answer: its status, the raw bytes, and what the data lines say."""

    status: int
    raw: str
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Events with choices."""
        return [event for event in self.events if event.get("choices")]

    def deltas(self, index: int = 0) -> list[str]:
        """The texts of one choice, those that are not empty."""
        found = (choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index)
        texts = (choice["delta"].get("content") if "delta" in choice else choice["text"] for choice in found)
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def finish_reasons(self) -> dict[int, list[str]]:
        """By the index of the choice; one each, if all is well."""
        reasons: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                if choice["finish_reason"] is not None:
                    reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
        return reasons

    @property
    def usage(self) -> dict[str, Any]:
        """That of the last event."""
        usage: dict[str, Any] = self.events[-1]["usage"]
        return usage


def read_stream(status: int, raw: str) -> Streamed:
    """Take server-sent events apart, strictly. Raises AssertionError for what a client could stumble over."""
    streamed = Streamed(status, raw)
    if status != 200:
        return streamed
    assert raw.endswith("\n\n")
    for block in raw.removesuffix("\n\n").split("\n\n"):
        assert not streamed.is_done, f"after [DONE]: {block!r}"
        if block.startswith(":"):
            assert "\n" not in block
        elif block == "data: [DONE]":
            streamed.is_done = True
        else:
            assert block.startswith("data: {")
            assert "\n" not in block
            streamed.events.append(loads(block.removeprefix("data: ")))
    return streamed


def loads(text: str) -> Any:
    """JSON without the words that are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"not JSON: {word}")

    return json.loads(text, parse_constant=refuse)


@dataclass
class RealCluster:
    """The running system and a client of it, for one test."""

    cluster: ServedCluster
    client: httpx.AsyncClient

    @property
    def workers(self) -> dict[str, ServedProcess]:
        """By role."""
        return {"prefill": self.cluster.prefill[0], "decode": self.cluster.decode[0]}

    async def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The answer to a completion that must succeed; greedy, if nothing else is said."""
        return await self._answer(COMPLETIONS, {"prompt": prompt, "temperature": 0} | fields)

    async def chat(self, messages: Any = HI, **fields: Any) -> dict[str, Any]:
        """As `completion`, for a conversation."""
        return await self._answer(CHAT, {"messages": messages, "temperature": 0} | fields)

    async def stream(self, path: str, **fields: Any) -> Streamed:
        """The whole of a streamed answer, whatever its status."""
        async with self.client.stream("POST", path, json={"temperature": 0, "stream": True} | fields) as response:
            raw = (await response.aread()).decode()
        streamed = read_stream(response.status_code, raw)
        assert response.status_code != 200 or streamed.is_done, raw[-300:]
        return streamed

    async def refusal(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a request that must be refused, before any header of a stream."""
        response = await self.client.post(path, json=fields)
        assert response.headers["content-type"] == "application/json"
        assert 400 <= response.status_code < 500, response.text
        error: dict[str, Any] = loads(response.text)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return response.status_code, error

    async def begin(self, path: str, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw connection on which a request was written, for a client that leaves."""
        url = httpx.URL(self.cluster.url)
        assert url.port is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps({"temperature": 0} | fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    def leftovers(self) -> dict[str, dict[str, float]]:
        """Gauges that are not at rest."""
        found = {name: leftovers(worker) for name, worker in self.workers.items()}
        status, body = http_get(f"{self.cluster.url}/load")
        found["gateway"] = {name: count for name, count in json.loads(body).items() if count} if status == 200 else {}
        return {name: gauges for name, gauges in found.items() if gauges}

    async def at_rest(self, timeout_s: float = REST_S) -> None:
        """Until nothing runs, waits, is held or uses a block, and the gateway has nobody in it."""
        await until(lambda: not self.leftovers(), lambda: f"at rest: {self.leftovers()}", timeout_s)

    async def probe(self) -> None:
        """What every case must leave behind."""
        answer = await self.chat()
        assert answer["choices"][0]["message"]["content"] == HI_ANSWER
        await self.at_rest()

    async def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = loads(response.text)
        return answer


async def until(is_so: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
    """Poll until `is_so`: another process has no event to wait for."""
    try:
        async with asyncio.timeout(timeout_s):
            for _ in iter(is_so, True):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what()}") from None


@pytest.fixture(scope="session")
def running_cluster(real_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """A prefill and a decode worker, Redis and a gateway that says often that it is alive."""
    options = {"kv-cache-memory-bytes": "512MiB"}
    gateway = {"keep-alive-s": KEEP_ALIVE_S}
    with ServedCluster(real_model_dir, tmp_path_factory.mktemp("weir"), options=options, gateway=gateway) as cluster:
        yield cluster


@pytest.fixture
async def real(running_cluster: ServedCluster) -> AsyncIterator[RealCluster]:
    """The shared system; afterwards it must be as it was."""
    async with httpx.AsyncClient(base_url=running_cluster.url, timeout=120) as client:
        cluster = RealCluster(running_cluster, client)
        yield cluster
        await cluster.probe()
