"""Loading, and the many ways in which a checkpoint is broken: each refuses and names the file or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.reference_model import Conversation
from tests.fakes.tiny_model import random_tensors, tiny_config, write_tiny_model
from weir.core.errors import ModelLoadError
from weir.core.model_card import ModelCard
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.prepare import prepare
from weir.engine.safetensors_file import INDEX_FILE, SafetensorsCheckpoint
from weir.engine.weights import Weights

CPU = torch.device("cpu")
SHARDS = [f"model-{shard:05}-of-00003.safetensors" for shard in (1, 2, 3)]
LAST_NORM = "model.norm.weight"


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of one safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda d: (d / SHARDS[1]).unlink(), SHARDS[1]),
    "shard cut in half": (lambda d: cut_in_half(d / SHARDS[2]), SHARDS[2]),
    "empty shard": (lambda d: (d / SHARDS[0]).write_bytes(b""), SHARDS[0]),
    "index names an unknown file": (
        lambda d: change_index(d, lambda m: m.update({LAST_NORM: "model-00009-of-00009.safetensors"})),
        "model-00009-of-00009.safetensors",
    ),
    "index names a tensor that is not there": (
        lambda d: change_index(d, lambda m: m.update({"model.layers.7.mlp.up_proj.weight": SHARDS[0]})),
        r"model\.layers\.7\.mlp\.up_proj\.weight",
    ),
    "index is not JSON": (lambda d: (d / INDEX_FILE).write_text("{"), INDEX_FILE),
    "index has no map": (lambda d: (d / INDEX_FILE).write_text("{}"), INDEX_FILE),
    "missing tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: missing"),
    "broken tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not a tokenizer"),
    "missing config": (lambda d: (d / "config.json").unlink(), r"config\.json: missing"),
    "broken config": (lambda d: (d / "config.json").write_text("[1]"), r"config\.json: not a JSON object"),
    "cut config": (lambda d: (d / "config.json").write_text('{"model_type": "lla'), r"config\.json: not JSON"),
    "no weights": (lambda d: [path.unlink() for path in d.glob("model*")], r"no \*\.safetensors file"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_s43_a_broken_directory_is_refused_by_name(tmp_path: Path, name: str) -> None:
    break_it, named = BREAKAGES[name]
    source = write_tiny_model(tmp_path / "hub", num_shards=3)
    break_it(source)
    with pytest.raises(ModelLoadError, match=named):
        prepare(str(source), output=tmp_path / "prepared")
    assert not (tmp_path / "prepared").exists()


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing tensor": (lambda t: t.pop(LAST_NORM), f"tensor {LAST_NORM} is missing"),
    "missing part of a fused tensor": (
        lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
        r"tensor model\.layers\.1\.self_attn\.k_proj\.weight is missing",
    ),
    "wrong shape": (
        lambda t: t.update({LAST_NORM: torch.ones(47)}),
        rf"model\.safetensors: tensor {LAST_NORM} has shape \[47\], the model needs \[48\]",
    ),
    "wrong shape of a fused part": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(80, 47)}),
        r"up_proj\.weight has shape \[80, 47\], the model needs \[80, 48\]",
    ),
    "tensor of another model": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        r"model\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place",
    ),
    "more layers than the config says": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(48)}),
        r"model\.layers\.2\.input_layernorm\.weight has no place",
    ),
    "unsupported dtype": (
        lambda t: t.update({LAST_NORM: torch.ones(48, dtype=torch.int32)}),
        rf"tensor {LAST_NORM} is torch\.int32, not floats",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path, name: str) -> None:
    change, named = CHANGES[name]
    source = write_tiny_model(tmp_path / "hub")
    rewrite(source / "model.safetensors", change)
    with pytest.raises(ModelLoadError, match=named):
        prepare(str(source), output=tmp_path / "prepared")


def test_what_breaks_after_the_preparation_stops_the_worker(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub", num_shards=3)
    config = EngineConfig(model_dir=prepare(str(source), output=tmp_path / "prepared"), num_blocks=128)
    ModelRunner(config)
    cut_in_half(source / SHARDS[1])
    with pytest.raises(ModelLoadError, match=rf"{SHARDS[1]}: has \d+ bytes, \d+ when it was prepared"):
        ModelRunner(config)
    (source / SHARDS[1]).unlink()
    with pytest.raises(ModelLoadError, match=f"{SHARDS[1]}: missing"):
        ModelRunner(config)


@pytest.mark.parametrize("file", ["weir_model.json", "weir_weights.json", "config.json"])
def test_a_prepared_directory_with_a_file_missing_or_broken_is_refused_by_name(tmp_path: Path, file: str) -> None:
    model_dir = prepare(str(write_tiny_model(tmp_path / "hub")), output=tmp_path / "prepared")
    config = EngineConfig(model_dir=model_dir, num_blocks=128)
    (model_dir / file).write_text("{")
    with pytest.raises(ModelLoadError, match=file):
        ModelRunner(config)
    (model_dir / file).unlink()
    with pytest.raises(ModelLoadError, match=file):
        ModelRunner(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_float_dtype_and_sharding_loads(tmp_path: Path, dtype: torch.dtype, num_shards: int) -> None:
    source = write_tiny_model(tmp_path / "hub", dtype=dtype, num_shards=num_shards)
    checkpoint = SafetensorsCheckpoint(sorted(source.glob("*.safetensors")))
    weights = Weights(checkpoint, torch.float32, CPU)
    for name, tensor in random_tensors(tiny_config()).items():
        assert torch.equal(weights.take(name, *tensor.shape), tensor.to(dtype).float())
    weights.finish()
    assert weights.num_parameters == sum(tensor.numel() for tensor in random_tensors(tiny_config()).values())


def test_a_tensor_in_the_wanted_dtype_is_a_view_of_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(64.0)}, tmp_path / "one.safetensors")
    checkpoint = SafetensorsCheckpoint([tmp_path / "one.safetensors"])
    first, second = (Weights(checkpoint, torch.float32, CPU).take("a", 64) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_stacked_tensors_are_their_parts_one_below_the_other(tmp_path: Path) -> None:
    parts = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "v": torch.randn(2, 3).bfloat16()}
    save_file(parts, tmp_path / "parts.safetensors")
    source = SafetensorsCheckpoint([tmp_path / "parts.safetensors"])
    weights = Weights(source, torch.float32, CPU)
    stacked = weights.take_stacked("qkv", ["q", "k", "v"], [4, 2, 2], 3)
    assert torch.equal(stacked, torch.cat([tensor.float() for tensor in parts.values()]))


def test_a_tied_head_in_the_file_is_allowed_and_not_used(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub", tie_word_embeddings=True)
    head = torch.full((384, 48), float("nan"))
    rewrite(source / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": head}))
    model_dir = prepare(str(source), output=tmp_path / "prepared")
    tensors = random_tensors(tiny_config(tie_word_embeddings=True))
    assert ModelCard.load(model_dir).num_parameters == sum(tensor.numel() for tensor in tensors.values())
    runner = ModelRunner(EngineConfig(model_dir=model_dir, num_blocks=128))
    assert Conversation(runner, [[5, 6, 7]]).finish(3)[0].isfinite().all()


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(source / "model.safetensors", lambda tensors: tensors.update(buffer))
    prepare(str(source), output=tmp_path / "prepared")


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelLoadError, match=r"b\.safetensors: tensor x is also in .*a\.safetensors"):
        SafetensorsCheckpoint([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
