"""Handles come from a peer: whatever is in them, mapping either works or is refused by name."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from weir.core.errors import UnavailableError
from weir.core.kv_layout import KvLayout
from weir.engine.block_copies import BlockCopies
from weir.engine.block_staging import StagedBlocks
from weir.engine.cuda_sharing import CudaSharing
from weir.engine.paged_kv_cache import PagedKvCache

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, kv_dtype="float16")


def copies_of(cache: PagedKvCache) -> StagedBlocks:
    return StagedBlocks(cache, BlockCopies(cache.tensor.device), size_bytes=1, on_failure=lambda error: None)


def sharing_of(device: torch.device) -> CudaSharing:
    cache = PagedKvCache(LAYOUT, 1, device)
    return CudaSharing(cache, copies_of(cache))


@pytest.mark.parametrize(
    "handle",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps({"gpu": "x", "size_bytes": 1, "parts": []}).encode(),
        json.dumps({"gpu": "x", "size_bytes": 1, "parts": ["00", 1, 0, "00", 0, "00", True]}).encode(),
    ],
)
def test_a_handle_that_means_nothing_here_is_refused(handle: bytes) -> None:
    with pytest.raises(UnavailableError):
        sharing_of(torch.device("cpu")).map(handle)


def test_the_domain_names_this_start_of_this_host() -> None:
    first, second = sharing_of(torch.device("cpu")), sharing_of(torch.device("cpu"))
    assert first.domain == second.domain != ""


def read_mapped(pipe: Connection) -> None:
    """In another process: what it sees of the cache."""
    memory = sharing_of(torch.device("cuda")).map(pipe.recv())
    pipe.send((memory.size_bytes, memory.tensor.cpu().numpy().tobytes()))
    pipe.recv()


@pytest.mark.gpu
def test_another_process_sees_the_cache() -> None:
    cache = PagedKvCache(LAYOUT, 8, torch.device("cuda"))
    cache.tensor.normal_()
    torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_mapped, args=(theirs,))
    process.start()
    ours.send(CudaSharing(cache, copies_of(cache)).export())
    assert ours.recv() == (cache.tensor.nbytes, cache.tensor.view(torch.uint8).cpu().numpy().tobytes())
    ours.send("done")
    process.join(30)
    assert process.exitcode == 0
