"""Decode graphs with a real tiny model and a recorder that computes anew at each replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.recorder import ReplayingRecorder
from weir.engine.batch import BatchArrays, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.decode_graphs import MAX_GRAPH_SEQS, DecodeGraphs, graph_sizes
from weir.engine.model_runner import ModelRunner

MAX_BLOCKS = 8
SIZES = [1, 2, 4, 8]


@pytest.fixture
def runner(tiny_model_dir: Path) -> ModelRunner:
    config = EngineConfig(model_dir=tiny_model_dir, device="cpu", num_blocks=128, kernel_cache_dir=None)
    runner = ModelRunner(config)
    torch.manual_seed(0)
    runner.cache.tensor.normal_()
    return runner


@pytest.fixture
def graphs(runner: ModelRunner) -> DecodeGraphs:
    with torch.inference_mode():
        return DecodeGraphs(
            runner.compute, ReplayingRecorder(), sizes=SIZES, max_blocks=MAX_BLOCKS, device=torch.device("cpu")
        )


def decodes(lengths: list[int], *, num_logits: int = 1, late: dict[int, int] | None = None) -> list[ScheduledSequence]:
    """A sequence each, of so many tokens with the one to compute."""
    return [
        ScheduledSequence(
            sequence_id=str(index),
            token_ids=(7 + index,),
            start=length - 1,
            block_ids=range(index * MAX_BLOCKS, (index + 1) * MAX_BLOCKS),
            num_logits=num_logits,
            late_source=(late or {}).get(index),
        )
        for index, length in enumerate(lengths)
    ]


def arrays(items: list[ScheduledSequence]) -> BatchArrays:
    return BatchArrays.from_scheduled(items, 16)


@torch.inference_mode()
def test_a_graph_of_any_size_gives_the_logits_and_the_kv_of_the_plain_step(
    runner: ModelRunner, graphs: DecodeGraphs
) -> None:
    before = runner.cache.tensor.clone()
    for lengths in ([3], [128, 1, 40], [5, 6, 7, 8, 9, 10, 11, 12], [17], [100, 2]):
        items = decodes(lengths)
        runner.cache.tensor.copy_(before)
        expected = runner.execute(items).clone()
        written = runner.cache.tensor.clone()
        runner.cache.tensor.copy_(before)
        assert graphs.fits(arrays(items))
        logits = graphs.run(arrays(items))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(runner.cache.tensor, written, rtol=1e-5, atol=1e-5)
        is_changed = (runner.cache.tensor != before).flatten(1).any(dim=1)
        assert is_changed.nonzero()[:, 0].tolist() == [
            index * MAX_BLOCKS + (length - 1) // 16 for index, length in enumerate(lengths)
        ]


@torch.inference_mode()
def test_recording_writes_no_block(runner: ModelRunner) -> None:
    before = runner.cache.tensor.clone()
    DecodeGraphs(runner.compute, ReplayingRecorder(), sizes=SIZES, max_blocks=MAX_BLOCKS, device=torch.device("cpu"))
    assert torch.equal(runner.cache.tensor, before)


@torch.inference_mode()
def test_a_late_token_is_the_one_that_the_step_before_chose(runner: ModelRunner, graphs: DecodeGraphs) -> None:
    expected = runner.execute(decodes([30, 60, 20])).clone()
    chosen = torch.tensor([0, 0, 9, 7])
    logits = graphs.run(arrays(decodes([30, 60, 20], late={0: 3, 2: 2})), chosen)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    plain = runner.execute(decodes([30, 60, 20], late={0: 3, 2: 2}), chosen)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_step_that_asks_for_no_logits_gets_none(graphs: DecodeGraphs) -> None:
    assert graphs.run(arrays(decodes([30, 60], num_logits=0))).shape == (0, 384)


def test_prefills_and_batches_beyond_the_largest_graph_do_not_fit(graphs: DecodeGraphs) -> None:
    prefill = ScheduledSequence(sequence_id="p", token_ids=(1, 2), start=0, block_ids=[90], num_logits=1)
    assert not graphs.fits(arrays([*decodes([3]), prefill]))
    assert graphs.fits(arrays(decodes([3] * 8)))
    assert not graphs.fits(arrays(decodes([3] * 9)))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])],
)
def test_graphs_cover_every_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes
    assert graph_sizes(10_000)[-1] == MAX_GRAPH_SEQS
