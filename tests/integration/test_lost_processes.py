"""Real processes, killed and stopped while streams run: nothing hangs, nothing is lost or repeated, nothing leaks."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import prompt_of
from tests.integration.http_streams import HttpStream, complete
from tests.integration.served_cluster import ServedCluster, ServedProcess, http_get, wait_until
from weir.cluster import keys

NUM_STREAMS = 8
NUM_TOKENS = 400
ANSWER_S = 10.0
REDISPATCH_WAIT_S = 4.0


@pytest.fixture(scope="module")
def started(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with ServedCluster(
        tiny_model_dir,
        tmp_path_factory.mktemp("cluster"),
        num_decode=2,
        options={"num-blocks": 512, "max-model-len": 1024, "drain-s": 20},
        prefill={"max-num-batched-tokens": 64, "lease-s": 3},
        gateway={"redispatch-wait-s": REDISPATCH_WAIT_S, "registration-ttl-s": 1.5, "drain-s": 20},
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: ServedCluster) -> Iterator[ServedCluster]:
    """All processes are up, before and after: who was killed is started again, and joins by itself."""
    revive(started)
    yield started
    revive(started)
    started.wait_at_rest()


def revive(cluster: ServedCluster) -> None:
    for process in cluster.processes:
        if not process.is_alive:
            process.start()
    cluster.wait_ready()
    wait_until(lambda: num_workers(cluster) == len(cluster.workers), "every worker is known to the gateway")


def num_workers(cluster: ServedCluster) -> int:
    """Workers that the gateway knows and is connected with."""
    status, body = http_get(f"{cluster.url}/v1/workers")
    return sum(worker["is_connected"] for worker in json.loads(body)["data"]) if status == 200 else 0


def body_of(index: int) -> dict[str, Any]:
    return {"prompt": prompt_of(100, seed=index), "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def expected(started: ServedCluster) -> list[str]:
    """The text that each of the streams must have in the end."""
    return [HttpStream(started.url, **body_of(index)).finish().text for index in range(NUM_STREAMS)]


def start_streams(cluster: ServedCluster) -> list[HttpStream]:
    """Eight streams, all of which have begun."""
    streams = [HttpStream(cluster.url, **body_of(index)) for index in range(NUM_STREAMS)]
    for stream in streams:
        assert stream.has_text.wait(20.0), "a stream does not begin"
    assert any(stream.is_alive() for stream in streams), "too short to be interrupted"
    return streams


def assert_unharmed(expected: list[str], streams: list[HttpStream]) -> None:
    for text, stream in zip(expected, streams, strict=True):
        stream.finish()
        assert stream.error is None, stream.error
        assert stream.text == text
        assert stream.is_complete


def busiest(workers: list[ServedProcess]) -> ServedProcess:
    return max(workers, key=lambda worker: worker.metrics()["vllm:num_requests_running"])


def test_the_death_of_prefill_harms_neither_streams_nor_prompts_under_way(
    cluster: ServedCluster, expected: list[str]
) -> None:
    bodies = [{"prompt": prompt_of(700, seed=50 + index), "max_tokens": 8} for index in range(NUM_STREAMS)]
    prompts_expected = [HttpStream(cluster.url, **body, cache_salt="expected").finish().text for body in bodies]
    streams = start_streams(cluster)
    prompts = [HttpStream(cluster.url, **body, cache_salt="again") for body in bodies]
    wait_until(lambda: cluster.prefill[0].metrics()["weir_held_blocks"] > 0, "a prompt is being computed", ANSWER_S)
    cluster.prefill[0].kill()
    assert_unharmed([*expected, *prompts_expected], [*streams, *prompts])
    assert complete(cluster.url, **body_of(0)) == expected[0], "without prefill workers decode computes prompts"

    revive(cluster)  # it joins by itself
    before = cluster.prefill[0].metrics()["vllm:prompt_tokens_total"]
    complete(cluster.url, prompt=prompt_of(200, seed=99), max_tokens=2)
    wait_until(
        lambda: cluster.prefill[0].metrics()["vllm:prompt_tokens_total"] > before, "prefill works again", ANSWER_S
    )


def test_streams_move_when_their_decode_worker_dies_and_end_with_its_name_when_none_is_left(
    cluster: ServedCluster, expected: list[str]
) -> None:
    streams = start_streams(cluster)
    busiest(cluster.decode).kill()
    assert_unharmed(expected, streams)

    streams = start_streams(cluster)
    killed_s = time.monotonic()
    for worker in cluster.decode:
        worker.kill()
    for stream in streams:
        stream.finish()
        assert stream.error is not None
        assert "decode" in json.dumps(stream.error)
        assert not stream.is_complete
        assert stream.ended_s - killed_s < ANSWER_S
    refused = HttpStream(cluster.url, prompt=prompt_of(20), max_tokens=2).finish()
    assert refused.status == 503


def test_streams_survive_the_death_of_redis_and_workers_register_again(
    cluster: ServedCluster, expected: list[str]
) -> None:
    streams = start_streams(cluster)
    cluster.redis.kill()
    assert_unharmed(expected, streams)
    assert complete(cluster.url, **body_of(1)) == expected[1]
    wait_until(lambda: busiest(cluster.decode).metrics()["weir_redis_up"] == 0, "workers know that Redis is away")
    assert cluster.prefill[0].is_ready(), "a worker is ready without Redis"
    cluster.redis.start()
    wait_until(lambda: num_registered(cluster) == len(cluster.workers), "workers register again", ANSWER_S)


def num_registered(cluster: ServedCluster) -> int:
    with cluster.redis.client() as client:
        return sum(1 for _ in client.scan_iter(match=f"{keys.WORKER_PREFIX}*"))


def test_workers_told_to_stop_finish_their_streams_and_exit_with_zero(
    cluster: ServedCluster, expected: list[str]
) -> None:
    streams = start_streams(cluster)
    leaving = [cluster.prefill[0], busiest(cluster.decode)]
    for worker in leaving:
        worker.signal(signal.SIGTERM)
    late = HttpStream(cluster.url, **body_of(2))
    assert_unharmed([*expected, expected[2]], [*streams, late])
    assert [worker.wait(20.0) for worker in leaving] == [0, 0]


def test_clients_that_leave_at_any_moment_free_everything(cluster: ServedCluster) -> None:
    streams = [
        HttpStream(cluster.url, prompt=prompt_of(600, seed=70 + index), max_tokens=300) for index in range(NUM_STREAMS)
    ]
    for index, stream in enumerate(streams):
        if index % 2:
            stream.has_text.wait(20.0)
        stream.must_leave.set()
    for stream in streams:
        stream.finish()
    cluster.wait_at_rest()
