"""Rows S19, S20, S25, S34 to S38, S40 and S45 of the cases: real processes on a tiny model, disturbed."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.conftest import IS_FULL
from tests.fakes.redis_server import RedisServer
from tests.fakes.tiny_model import prepare_tiny_model
from tests.integration.engines import prompt_of
from tests.integration.http_streams import HttpStream, complete
from tests.integration.served_cluster import ServedCluster, ServedProcess, http_get, wait_until
from weir.cli.probes import free_ports

LEASE_S = 2.0
BLOCK_SIZE = 16
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4
"""Layers, K and V, heads, head size, float32."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of a long context."""
    return prepare_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16_384, head_dim=64)


@pytest.fixture(scope="module")
def started(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with ServedCluster(
        model_dir,
        tmp_path_factory.mktemp("failures"),
        options={"num-blocks": 2048, "max-model-len": 12_000, "drain-s": 20},
        prefill={"max-num-batched-tokens": 128, "lease-s": LEASE_S},
        gateway={"registration-ttl-s": 1.5, "lease-s": LEASE_S, "redispatch-wait-s": 20, "drain-s": 20},
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: ServedCluster) -> Iterator[ServedCluster]:
    """All processes are up, before and after, and nothing is left in any."""
    revive(started)
    expected = complete(started.url, **HI)
    yield started
    revive(started)
    assert complete(started.url, **HI) == expected
    started.wait_at_rest()


HI = {"prompt": prompt_of(31, seed=31), "max_tokens": 8}


def revive(cluster: ServedCluster) -> None:
    for process in cluster.processes:
        if not process.is_alive:
            process.start()
    cluster.wait_ready()
    wait_until(lambda: num_connected(cluster) == len(cluster.workers), "every worker is known to the gateway")


def num_connected(cluster: ServedCluster) -> int:
    status, body = http_get(f"{cluster.url}/v1/workers")
    return sum(worker["is_connected"] for worker in json.loads(body)["data"]) if status == 200 else 0


def begin(cluster: ServedCluster, **body: Any) -> socket.socket:
    """A connection on which a completion was asked for, for a client that leaves."""
    url = httpx.URL(cluster.url)
    connection = socket.create_connection((url.host, url.port))
    raw = json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + raw)
    return connection


def num_held(cluster: ServedCluster) -> float:
    return cluster.prefill[0].metrics()["weir_held_blocks"]


def test_s40_8000_tokens_are_handed_over_in_pieces(cluster: ServedCluster) -> None:
    body = {"prompt": prompt_of(8000, seed=40), "max_tokens": 6}

    def num_moved() -> float:
        return cluster.decode[0].metrics().get("weir_handoff_bytes_total", 0.0)

    expected = num_moved() + 8000 * KV_BYTES_PER_TOKEN
    handed = complete(cluster.url, **body)
    wait_until(lambda: num_moved() >= expected, "all of it is counted")
    assert complete(cluster.url, **body) == handed


@pytest.mark.parametrize("num_rounds", [1, pytest.param(10, marks=pytest.mark.full)])
def test_s19_decode_gives_back_what_it_claimed_for_blocks_that_never_come(
    cluster: ServedCluster, num_rounds: int
) -> None:
    bodies = [{"prompt": prompt_of(1500, seed=index), "max_tokens": 8} for index in range(12)]
    expected = [complete(cluster.url, **body, cache_salt="expected") for body in bodies]
    for number in range(num_rounds):
        staying = [HttpStream(cluster.url, **body, cache_salt=f"round {number}") for body in bodies[::2]]
        leaving = [begin(cluster, **body, cache_salt=f"round {number}") for body in bodies[1::2]]
        wait_until(lambda: cluster.decode[0].metrics()["weir_handoffs_in_flight"] > 0, "decode waits for blocks")
        cluster.prefill[0].kill()
        for connection in leaving:
            connection.close()
        for text, stream in zip(expected[::2], staying, strict=True):
            stream.finish()
            assert stream.error is None
            assert stream.text == text
        cluster.wait_at_rest()
        revive(cluster)


def test_s20_a_hold_that_a_stopped_decode_worker_never_fetches_ends_with_its_client(cluster: ServedCluster) -> None:
    cluster.decode[0].signal(signal.SIGSTOP)
    try:
        connection = begin(cluster, prompt=prompt_of(300, seed=20), max_tokens=4)
        wait_until(lambda: num_held(cluster) >= 300 // BLOCK_SIZE, "the prefill worker holds blocks", 10.0)
        connection.close()
        wait_until(lambda: num_held(cluster) == 0, "the gateway releases the hold", 5.0)
    finally:
        cluster.decode[0].signal(signal.SIGCONT)


def test_s20_a_hold_ends_by_its_lease_when_the_gateway_is_gone_too(cluster: ServedCluster) -> None:
    before = cluster.prefill[0].metrics()["weir_leases_expired_total"]
    cluster.decode[0].signal(signal.SIGSTOP)
    try:
        connection = begin(cluster, prompt=prompt_of(300, seed=21), max_tokens=4)
        wait_until(lambda: num_held(cluster) >= 300 // BLOCK_SIZE, "the prefill worker holds blocks", 10.0)
        assert cluster.gateway is not None
        cluster.gateway.kill()
        connection.close()
        wait_until(lambda: num_held(cluster) == 0, "the lease ends", 3 * LEASE_S)
        assert cluster.prefill[0].metrics()["weir_leases_expired_total"] > before
    finally:
        cluster.decode[0].signal(signal.SIGCONT)


def test_s20_a_client_that_stays_gets_its_own_answer_after_the_lease(cluster: ServedCluster) -> None:
    body = {"prompt": prompt_of(300, seed=22), "max_tokens": 12}
    expected = complete(cluster.url, **body, cache_salt="expected")
    cluster.decode[0].signal(signal.SIGSTOP)
    try:
        stream = HttpStream(cluster.url, **body)
        wait_until(lambda: num_held(cluster) >= 300 // BLOCK_SIZE, "the prefill worker holds blocks", 10.0)
        threading.Event().wait(2 * LEASE_S)
    finally:
        cluster.decode[0].signal(signal.SIGCONT)
    stream.finish()
    assert stream.error is None, stream.error
    assert stream.text == expected


def test_s36_a_dead_decode_worker_is_noticed_when_nothing_runs(cluster: ServedCluster) -> None:
    cluster.decode[0].kill()
    wait_until(lambda: http_get(f"{cluster.url}/ready")[0] == 503, "the gateway is not ready", 10.0)
    assert http_get(f"{cluster.url}/health")[0] == 200
    refused = HttpStream(cluster.url, **HI).finish()
    assert refused.status == 503
    revive(cluster)


def test_s37_a_gateway_told_to_stop_finishes_20_streams_and_refuses_new_ones(cluster: ServedCluster) -> None:
    body = HI | {"max_tokens": 400}
    expected = complete(cluster.url, **body)
    streams = [HttpStream(cluster.url, **body) for _ in range(20)]
    for stream in streams:
        assert stream.has_text.wait(20.0)
    assert cluster.gateway is not None
    cluster.gateway.signal(signal.SIGTERM)
    wait_until(lambda: http_get(f"{cluster.url}/ready")[0] != 200, "it is not ready", 5.0)
    assert HttpStream(cluster.url, **HI).finish().status in (0, 503)
    for stream in streams:
        stream.finish()
        assert stream.error is None
        assert stream.text == expected
    assert cluster.gateway.wait(20.0) == 0
    cluster.gateway.kill()


def test_s37_told_twice_it_ends_at_once_and_the_workers_are_free(cluster: ServedCluster) -> None:
    connection = begin(cluster, **HI | {"max_tokens": 10_000}, stream=True)
    wait_until(lambda: cluster.decode[0].metrics()["vllm:num_requests_running"] > 0, "it runs", 10.0)
    assert cluster.gateway is not None
    for _ in range(2):
        cluster.gateway.signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(cluster.gateway), "it has heard", 5.0)
    cluster.gateway.wait(5.0)
    cluster.gateway.kill()
    connection.close()
    cluster.wait_at_rest()


def is_ready(process: ServedProcess | None) -> bool:
    assert process is not None
    return http_get(f"{process.url}/ready")[0] == 200


class SteadyCalls(threading.Thread):
    """Twenty calls a second until told to stop; how each ended and how long the longest took."""

    def __init__(self, cluster: ServedCluster) -> None:
        super().__init__(daemon=True)
        self._url = cluster.url
        self.statuses: list[int] = []
        self.longest_s = 0.0
        self.must_stop = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self.must_stop.wait(0.05):
                started_s = time.monotonic()
                status = client.post("/v1/completions", json=HI).status_code
                self.statuses.append(status)
                self.longest_s = max(self.longest_s, time.monotonic() - started_s)


@pytest.mark.parametrize("fault", ["role switch", "pause", "hang", "restart empty"])
def test_s38_calls_and_streams_go_on_whatever_redis_does(cluster: ServedCluster, fault: str) -> None:
    body = HI | {"max_tokens": 500}
    expected = complete(cluster.url, **body)
    scale = 1.0 if IS_FULL else 0.25
    pause = threading.Event()
    calls, stream = SteadyCalls(cluster), HttpStream(cluster.url, **body)
    redis = cluster.redis
    if fault == "role switch":
        with RedisServer() as other:
            redis.replicate(other)
            pause.wait(10.0 * scale)
            redis.promote()
    elif fault == "pause":
        redis.call("CLIENT", "PAUSE", int(5000 * scale), "ALL")
        pause.wait(5.0 * scale)
    elif fault == "hang":
        redis.stop()
        pause.wait(10.0 * scale)
        redis.resume()
    else:
        redis.restart_empty()
    wait_until(lambda: cluster.decode[0].metrics()["weir_redis_up"] == 1, "the worker's link is back", 20.0)
    wait_until(lambda: num_connected(cluster) == 2, "the gateway knows both workers", 20.0)
    num_before = len(calls.statuses)
    wait_until(lambda: len(calls.statuses) > num_before + 5, "calls are answered after it too")
    calls.must_stop.set()
    calls.join(60.0)
    assert set(calls.statuses) == {200}
    assert calls.longest_s < 10.0
    stream.finish()
    assert stream.error is None
    assert stream.text == expected
    wait_until(lambda: len(redis.assert_every_key_expires()) >= 2, "workers have registered again", 10.0)


def test_s34_s35_with_a_key_every_door_is_closed_but_one(
    cluster: ServedCluster, model_dir: Path, tmp_path: Path
) -> None:
    port, grpc_port = free_ports(2)
    argv = [sys.executable, "-m", "gateway", "--model-dirs", str(model_dir), "--redis-url", cluster.redis.url]
    argv += ["--port", str(port), "--grpc-port", str(grpc_port), "--api-keys", "k-1", "--cors-origins", "https://a.b"]
    locked = ServedProcess("locked", argv, url=f"http://127.0.0.1:{port}", log_path=tmp_path / "locked.log")
    locked.start()
    try:
        wait_until(lambda: http_get(f"{locked.url}/health")[0] == 200, "it lives")
        with httpx.Client(base_url=locked.url, timeout=30) as client:
            key = {"authorization": "bearer k-1"}
            wait_until(lambda: client.get("/ready", headers=key).status_code == 200, "it is ready")
            paths = client.get("/openapi.json", headers=key).json()["paths"]
            for path in [*paths, "/docs", "/openapi.json", "//v1/models", "/V1/models", "/invocations"]:
                if path != "/health":
                    for method in ("GET", "POST"):
                        assert client.request(method, path, json=HI).status_code == 401, path
            body = HI | {"temperature": 0}
            assert client.post("/v1/completions", json=body, headers=key).status_code == 200
            assert client.post("/v1/completions", json=body, headers={"authorization": "Bearer k-2"}).status_code == 401
            asked = {"origin": "https://a.b", "access-control-request-method": "POST"}
            asked |= {"access-control-request-headers": "authorization,content-type"}
            preflight = client.options("/v1/chat/completions", headers=asked)
            assert preflight.status_code in (200, 204)
            assert preflight.headers["access-control-allow-origin"] == "https://a.b"
            refused = client.post("/v1/chat/completions", json={}, headers={"origin": "https://a.b"})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.b")
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            with pytest.raises(grpc.RpcError) as closed:
                stub.ListModels(inference_pb2.ListModelsRequest())
            assert closed.value.code() is grpc.StatusCode.UNAUTHENTICATED
            stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("authorization", "Bearer k-1"),))
    finally:
        locked.kill()


@pytest.mark.parametrize(
    ("num_warm", "num_calls", "bytes_per_call"),
    [(150, 450, 12_000), pytest.param(2000, 20_000, 100, marks=pytest.mark.full)],
)
def test_s45_calls_leave_no_memory_behind(
    cluster: ServedCluster, num_warm: int, num_calls: int, bytes_per_call: int
) -> None:
    prefix = prompt_of(200, seed=45)
    processes = cluster.processes

    def call(client: httpx.Client, number: int) -> None:
        body = {"prompt": [*prefix, *prompt_of(20, seed=number)], "max_tokens": 4, "temperature": 0}
        kind = number % 20
        if kind < 4:
            begin(cluster, **body, stream=True).close()
        elif kind < 8:
            assert client.post("/v1/completions", json=body | {"stream": True}).text.endswith("data: [DONE]\n\n")
        elif kind == 8:
            assert client.post("/v1/completions", json=body | {"temperature": -1}).status_code == 400
        else:
            assert client.post("/v1/completions", json=body).status_code == 200

    with httpx.Client(base_url=cluster.url, timeout=60) as client, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: call(client, number), range(num_warm)))
        cluster.wait_at_rest()
        before = {process.name: anonymous_bytes(process) for process in processes}
        list(pool.map(lambda number: call(client, number), range(num_warm, num_warm + num_calls)))
    cluster.wait_at_rest()
    growth = {process.name: (anonymous_bytes(process) - before[process.name]) / num_calls for process in processes}
    assert max(growth.values()) < bytes_per_call, growth
    assert len(cluster.redis.assert_every_key_expires()) < 2 * (num_warm + num_calls) + 100


def anonymous_bytes(process: ServedProcess) -> int:
    """Memory of a process that is its own, resident or swapped out, without the KV pool, which fills with its use.

    The pool is the one mapping that was advised to have huge pages.
    """
    total, of_mapping = 0, 0
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Anonymous", "Swap"):
            of_mapping += int(value.split()[0]) * 1024
        elif name == "VmFlags":  # the last line of each mapping
            total += 0 if "hg" in value.split() else of_mapping
            of_mapping = 0
    return total


@pytest.fixture(scope="module")
def crowded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """A decode worker whose pool is too small for what it is given."""
    with ServedCluster(
        tiny_model_dir,
        tmp_path_factory.mktemp("crowded"),
        options={"max-model-len": 320},
        prefill={"num-blocks": 256},
        decode={"num-blocks": 22},
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.8, "seed": 11}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"logprobs": 3}],
    ids=["greedy", "seeded", "penalties", "logprobs"],
)
def test_s25_a_preempted_stream_equals_its_solo_run(crowded: ServedCluster, fields: dict[str, Any]) -> None:
    bodies = [{"prompt": prompt_of(14, seed=25 + index), "max_tokens": 120} | fields for index in range(8)]
    alone = [complete(crowded.url, **body) for body in bodies]
    before = crowded.decode[0].metrics()["vllm:num_preemptions_total"]
    streams = [HttpStream(crowded.url, **body) for body in bodies]
    for text, stream in zip(alone, streams, strict=True):
        stream.finish()
        assert stream.error is None, stream.error
        assert stream.text == text
        assert stream.finish_reason == "length"
    assert crowded.decode[0].metrics()["vllm:num_preemptions_total"] > before
    crowded.wait_at_rest()
