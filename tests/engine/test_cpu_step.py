"""A step by the CPU kernels: a row's bits depend on its own sequence alone, and quantised weights are what they stand
for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.gguf_model import write_tiny_gguf
from tests.fakes.reference_model import Conversation
from tests.kernels.cpu_library import needs_compiler
from weir.engine.batch import ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.prepare import prepare

pytestmark = needs_compiler

SEQUENCES = [[3 + (7 * length + 11 * index) % 380 for index in range(length)] for length in (150, 70, 33, 2)]
SIZES: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def prepare_tiny(tmp_path: Path, family: str, quantization: str, **sizes: int) -> Path:
    sizes = SIZES | sizes
    write_tiny_gguf(tmp_path / "tiny.gguf", family, quantization=quantization, tie_word_embeddings=True, **sizes)
    return prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "prepared")


def make_runner(model_dir: Path, **settings: object) -> ModelRunner:
    return ModelRunner(EngineConfig(model_dir=model_dir, max_model_len=256, **({"num_blocks": 512} | settings)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        ("F32", {}),
        ("F16", {"dtype": "float16", "kv_cache_dtype": "float16"}),
        ("BF16", {"dtype": "bfloat16", "kv_cache_dtype": "float32"}),
        ("Q8_0", {"quantization": "auto"}),
        ("Q4_1", {"quantization": "auto"}),
        ("Q8_0", {"quantization": "auto", "kv_cache_dtype": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sequence_s_logits_are_the_same_bits_whatever_runs_beside_it(
    tmp_path: Path, family: str, stored: str, settings: dict[str, object]
) -> None:
    model_dir = prepare_tiny(tmp_path, family, stored)
    runner = make_runner(model_dir, **settings)
    whole = [Conversation(runner, [tokens]).finish(200)[0] for tokens in SEQUENCES]
    together = Conversation(runner, SEQUENCES).finish(200)
    chunked = Conversation(runner, SEQUENCES, seed=1).finish(13)
    single = Conversation(runner, SEQUENCES, seed=2).finish(1)
    other = make_runner(model_dir, block_size=1, num_threads=1, **settings)
    elsewhere = Conversation(other, SEQUENCES[::-1]).finish(29)[::-1]
    for index, expected in enumerate(whole):
        for name, found in (("together", together), ("chunked", chunked), ("single", single), ("there", elsewhere)):
            assert torch.equal(found[index], expected), name


@pytest.mark.parametrize(
    ("stored", "quantization", "tolerance"),
    [
        ("Q4_0", "auto", 0.04),
        ("Q4_1", "int4", 0.04),
        ("Q8_0", "auto", 1e-3),
        ("Q8_0", "int4", 1e-3),
        ("F32", "auto", 1e-5),
        ("F32", "int8", 0.06),
        ("Q4_1", "int8", 0.06),
        ("Q5_1", "auto", 0.06),
    ],
)
def test_quantised_weights_compute_what_they_stand_for(
    tmp_path: Path, stored: str, quantization: str, tolerance: float
) -> None:
    model_dir = prepare_tiny(tmp_path, "llama", stored)
    exact = Conversation(make_runner(model_dir), SEQUENCES).finish(200)
    found = Conversation(make_runner(model_dir, quantization=quantization), SEQUENCES).finish(200)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).square().mean().sqrt() < tolerance * other.square().mean().sqrt()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kernel_cache_dir", [Path("~/.cache/weir/kernels"), None], ids=["kernels", "torch"])
def test_an_eight_bit_cache_moves_the_logits_by_little(
    tmp_path: Path, family: str, kernel_cache_dir: Path | None
) -> None:
    model_dir = prepare_tiny(tmp_path, family, "F32")
    exact = Conversation(make_runner(model_dir), SEQUENCES).finish(200)
    runner = make_runner(model_dir, kv_cache_dtype="int8", kernel_cache_dir=kernel_cache_dir)
    assert runner.layout.token_bytes * 4 < make_runner(model_dir).layout.token_bytes * 1.2
    for one, other in zip(Conversation(runner, SEQUENCES).finish(64), exact, strict=True):
        assert 0 < (one - other).square().mean().sqrt() < 0.02 * other.square().mean().sqrt()


def test_a_prompt_of_8192_tokens_takes_memory_for_its_rows_alone(tmp_path: Path) -> None:
    length = 8192
    model_dir = prepare_tiny(tmp_path, "llama", "Q8_0", max_position_embeddings=length)
    tokens = tuple(3 + 11 * index % 380 for index in range(length))
    last_rows = []
    for budget in (length, 512):
        runner = ModelRunner(
            EngineConfig(model_dir=model_dir, num_blocks=512, max_num_batched_tokens=budget, quantization="auto")
        )
        before = _memory_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        for start in range(0, length, budget):
            part = ScheduledSequence(
                sequence_id="long",
                token_ids=tokens[start : start + budget],
                start=start,
                block_ids=range(512),
                num_logits=1,
            )
            logits = runner.execute([part])
        # The scores of one head alone, all against all, would be 256 MiB.
        assert _memory_kib("VmHWM") - before < 64 << 10
        last_rows.append(logits.clone())
    assert torch.equal(*last_rows)


def _memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_packed_weights_are_written_once_and_mapped(tmp_path: Path) -> None:
    model_dir = prepare_tiny(tmp_path, "llama", "Q8_0")
    older = model_dir / "packed-auto-float32-00000000.safetensors"
    other = model_dir / "packed-none-float32-00000000.safetensors"
    older.touch()
    other.touch()
    make_runner(model_dir, quantization="auto")
    assert not older.exists(), "nobody reads what an earlier layout left"
    other.unlink()
    (packed,) = model_dir.glob("packed-*.safetensors")
    written = packed.stat()
    make_runner(model_dir, quantization="auto")
    assert packed.stat().st_mtime_ns == written.st_mtime_ns
    assert not list(model_dir.glob("*.tmp"))


def test_a_damaged_file_of_packed_weights_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = prepare_tiny(tmp_path, "llama", "Q8_0")
    expected = Conversation(make_runner(model_dir, quantization="auto"), SEQUENCES).finish(64)
    (packed,) = model_dir.glob("packed-*.safetensors")
    size_bytes = packed.stat().st_size
    packed.write_bytes(packed.read_bytes()[: size_bytes // 2])
    found = Conversation(make_runner(model_dir, quantization="auto"), SEQUENCES).finish(64)
    assert "it is written again" in caplog.text
    assert packed.stat().st_size == size_bytes
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_a_compiler_the_torch_path_computes_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = prepare_tiny(tmp_path, "qwen3", "F32")
    expected = Conversation(make_runner(model_dir), SEQUENCES).finish(64)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Conversation(make_runner(model_dir, kernel_cache_dir=tmp_path / "kernels"), SEQUENCES).finish(64)
    assert "no C++ compiler" in caplog.text
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max()
