"""`weir bench` against the real system: what it asks for is what the server counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.real_cluster import RealCluster
from weir.cli.__main__ import main


async def bench(real: RealCluster, path: Path, *options: str) -> dict[str, Any]:
    """The result of a measurement without a failure, by a thread beside this loop."""

    def run() -> dict[str, Any]:
        assert main(["bench", "--base-url", real.cluster.url, "--quiet", "--json", str(path), *options]) == 0
        document: dict[str, Any] = json.loads(path.read_text())
        return document

    document = await asyncio.to_thread(run)
    assert document["complete"]
    return document


@pytest.mark.parametrize("kind", ["tokens", "text"])
async def test_prompts_and_answers_have_the_lengths_asked_for(real: RealCluster, tmp_path: Path, kind: str) -> None:
    shape = ("--input-tokens", "40:80", "--output-tokens", "8", "--num-requests", "6", "--concurrency", "3")
    document = await bench(real, tmp_path / "r.json", *shape, "--prompt-kind", kind)
    assert [request["input_tokens"] for request in document["requests"]] == [
        request["asked_input_tokens"] for request in document["requests"]
    ]
    assert {request["output_tokens"] for request in document["requests"]} == {8}
    assert {request["output_tokens_from"] for request in document["requests"]} == {"usage"}
    assert not [note for note in document["notes"] if "counts other" in note or "cache" in note]
    for request in document["requests"]:
        assert 0 < request["ttft_s"] <= request["e2el_s"]
        assert request["ttft_s"] + sum(request["itl_s"]) <= request["e2el_s"]


async def test_a_shared_prefix_comes_from_the_prefix_cache(real: RealCluster, tmp_path: Path) -> None:
    shape = ("--workload", "w4", "--shared-prefix-tokens", "128", "--num-requests", "4", "--concurrency", "1")
    document = await bench(real, tmp_path / "r.json", *shape, "--output-tokens", "4")
    assert [request["cached_tokens"] or 0 for request in document["requests"]] == [0, 128, 128, 128]


async def test_a_burst_among_steady_streams(real: RealCluster, tmp_path: Path) -> None:
    shape = ("--workload", "w5", "--concurrency", "2", "--output-tokens", "80", "--burst-input-tokens", "300")
    document = await bench(real, tmp_path / "r.json", *shape, "--burst-requests", "2")
    assert document["burst"]["num_itl_samples"] > 0
    assert document["burst"]["ttft_p50_s"] > 0
    assert document["itl_p99_ratio"] > 0
