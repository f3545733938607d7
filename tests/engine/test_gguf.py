"""GGUF files: the container, the model in it, the tokenizer in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.fakes.gguf_model import write_tiny_gguf
from tests.fakes.reference_model import MAX_RELATIVE_DIFFERENCE, Conversation, largest_difference
from tests.fakes.tiny_model import random_tensors, tiny_config, write_tiny_model, write_tokenizer
from weir.core.errors import ModelLoadError
from weir.core.model_card import ModelCard
from weir.engine.config import EngineConfig
from weir.engine.gguf_file import GgufFile
from weir.engine.gguf_model import GgufCheckpoint
from weir.engine.gguf_tokenizer import build_tokenizer
from weir.engine.layers.rotary_embedding import inverse_frequencies
from weir.engine.model_runner import ModelRunner
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.prepare import prepare
from weir.engine.prepared_model import write_prepared

TOKENS = [3 + 11 * index % 380 for index in range(60)]


def logits(model_dir: Path) -> torch.Tensor:
    runner = ModelRunner(EngineConfig(model_dir=model_dir, num_blocks=128))
    return Conversation(runner, [TOKENS]).finish(64)[0]


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_s41_s42_a_float_gguf_computes_what_its_safetensors_twin_does(
    tmp_path: Path, family: str, is_tied: bool, quantization: str
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", family, quantization=quantization, tie_word_embeddings=is_tied)
    twin = write_tiny_model(tmp_path / "hub", family, tie_word_embeddings=is_tied)
    from_gguf = logits(prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "a"))
    from_hub = logits(prepare(str(twin), output=tmp_path / "b"))
    tolerance = {"F32": MAX_RELATIVE_DIFFERENCE, "F16": 0.01, "BF16": 0.05}[quantization]
    assert largest_difference(from_gguf, from_hub) <= tolerance
    assert torch.nn.functional.cosine_similarity(from_gguf, from_hub).min() > 0.998


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_dequantised(tmp_path: Path, quantization: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    config = write_tiny_gguf(tmp_path / "tiny.gguf", "qwen2", quantization=quantization, **sizes)
    checkpoint = GgufCheckpoint(tmp_path / "tiny.gguf")
    original = random_tensors(config)
    assert checkpoint.specs.keys() == original.keys()
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in original.items():
        stored = checkpoint.read(name)
        assert stored.shape == tensor.shape == checkpoint.specs[name].shape
        if tensor.dim() == 2:
            assert torch.equal(stored, torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)))
            assert (stored - tensor).abs().max() < 0.15 * tensor.abs().max()


@pytest.mark.parametrize("quantization", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read_as_the_gguf_package_reads_them(tmp_path: Path, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (4, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "one.gguf").read("token_embd.weight")
    assert tensor.shape == (4, 512)
    np.testing.assert_array_equal(tensor.numpy(), gguf.dequantize(raw, kind))


def test_a_split_model_is_joined_from_any_part(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    write_tiny_gguf(tmp_path / "tiny.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) == 3
    whole = logits(prepare(str(tmp_path / "whole.gguf"), output=tmp_path / "a"))
    joined = prepare(str(parts[1]), output=tmp_path / "b")
    assert ModelCard.load(joined).name == "tiny"
    assert torch.equal(logits(joined), whole)
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"tiny-00003-of-00003\.gguf: missing"):
        prepare(str(parts[0]), output=tmp_path / "c")


def test_weights_too_large_to_copy_are_read_where_they_are(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    copied, pointing = tmp_path / "copied", tmp_path / "pointing"
    for output, max_copied_bytes in ((copied, 1 << 30), (pointing, 1000)):
        output.mkdir()
        write_prepared(tmp_path / "tiny.gguf", output, "tiny", max_copied_bytes=max_copied_bytes)
    assert (copied / "tiny.gguf").exists()
    assert not (pointing / "tiny.gguf").exists()
    assert torch.equal(logits(pointing), logits(copied))
    assert ModelCard.load(pointing).weights_hash == ModelCard.load(copied).weights_hash


def test_llama31_divisors_give_llama3_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
    config = DecoderConfig.from_hf(tiny_config(rope_parameters=rope))
    plain = DecoderConfig.from_hf(tiny_config(rope_theta=500.0))
    divisors = inverse_frequencies(plain.rope, 1) / inverse_frequencies(config.rope, 1)
    extra = {"rope_freqs.weight": divisors[0].numpy()}
    write_tiny_gguf(tmp_path / "tiny.gguf", rope_theta=500.0, extra_tensors=extra)
    twin = write_tiny_model(tmp_path / "hub", rope_parameters=rope)
    from_gguf = logits(prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "a"))
    assert largest_difference(from_gguf, logits(prepare(str(twin), output=tmp_path / "b"))) <= MAX_RELATIVE_DIFFERENCE


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, ("yarn", 2.0)),
        ({"llama.rope.scaling.type": "none"}, ("default", None)),
        ({"llama.rope.scale_linear": 2.0}, ("linear", 2.0)),
    ],
)
def test_rope_scaling_of_the_metadata_is_kept(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[str, float | None]
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", fields=fields)
    config = DecoderConfig.from_hf(GgufCheckpoint(tmp_path / "tiny.gguf").hub_config())
    assert (config.rope.rope_type, config.rope.factor) == expected


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", fields={"llama.attention.sliding_window": 7})
    config = DecoderConfig.from_hf(GgufCheckpoint(tmp_path / "tiny.gguf").hub_config())
    assert config.sliding_windows == (7, 7)


def test_the_tokenizer_equals_the_one_the_file_was_made_from(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_tokenizer(tmp_path)
    original = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    model_dir = prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "prepared")
    built = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for text in ("hello world", "the fox<|im_end|>jumps", "  tabs\tand\n\nlines  ", "a1234 don't", "鼠标 😀 ñ", ""):
        assert built.encode(text).ids == original.encode(text).ids
        assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["add_bos_token"] is False
    assert "im_start" in settings["chat_template"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary as SentencePiece makes them: bytes, then pieces with scores."""
    pieces = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "el",
        "lo",
        "▁h",
        "or",
        "▁w",
        "hel",
        "▁hello",
        "ld",
        "▁wor",
        "llo",
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *pieces, "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [0.0],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def test_sentencepiece_joins_the_best_scored_pair_first() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata, Path("x.gguf"))
    assert tokenizer.encode("hello world").tokens == ["<s>", "▁h", "el", "lo", "▁wor", "ld"]
    assert tokenizer.decode(tokenizer.encode("hello world").ids) == "hello world"


def test_sentencepiece_equals_the_converter_of_transformers() -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = sentencepiece_metadata()
    ours = build_tokenizer(metadata, Path("x.gguf"))
    names = {"tokens": "tokens", "scores": "scores", "token_type": "token_type", "tokenizer_type": "model"}
    theirs, _ = convert_gguf_tokenizer("llama", {key: metadata[f"tokenizer.ggml.{n}"] for key, n in names.items()})
    for text in ("hello", "hello world", "held  lower", "é鼠", "hello<tool>"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


def test_a_text_after_an_added_token_starts_like_a_text() -> None:
    """As llama.cpp and Llama 2's own tokenizer.json have it; transformers' newer converter leaves the space out."""
    tokenizer = build_tokenizer(sentencepiece_metadata(), Path("x.gguf"))
    assert tokenizer.encode("hel<tool>hel").tokens == ["<s>", "▁h", "el", "<tool>", "▁h", "el"]


def test_bytes_outside_the_vocabulary_survive_sentencepiece() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(), Path("x.gguf"))
    assert tokenizer.decode(tokenizer.encode("hé鼠").ids) == "hé鼠"


def test_bos_is_added_when_the_file_says_so() -> None:
    silent = sentencepiece_metadata()
    refused = sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False})
    assert build_tokenizer(silent, Path("x.gguf")).encode("h").ids[0] == 1
    assert build_tokenizer(refused, Path("x.gguf")).encode("h").ids[0] != 1


def test_user_defined_and_control_tokens_are_never_split() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata(), Path("x.gguf"))
    tool = sentencepiece_metadata()["tokenizer.ggml.tokens"].index("<tool>")
    assert tool in tokenizer.encode("h<tool>h").ids
    assert tokenizer.decode([tool]) == "<tool>"
    assert 2 in tokenizer.encode("h</s>").ids
    assert tokenizer.decode([2]) == ""


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.scores": None}, "no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard-of"}, "unheard-of"),
        ({"tokenizer.ggml.model": "gpt2"}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "same token twice"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        build_tokenizer(sentencepiece_metadata(**changes), Path("x.gguf"))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported"):
        GgufCheckpoint(tmp_path / "x.gguf")


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "x.gguf", extra_tensors={"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelLoadError, match=r"x\.gguf: tensor blk\.0\.ffn_gate_exps\.weight"):
        GgufCheckpoint(tmp_path / "x.gguf")


def test_any_cut_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    last = list(GgufFile(path).tensors)[-1]
    for size in (0, 3, 20, 30, 500, len(whole) // 20, len(whole) // 2, len(whole) - 4000):
        cut = tmp_path / f"cut-{size}.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=f"cut-{size}"):
            GgufFile(cut)
    cut.write_bytes(whole[:-4000])
    with pytest.raises(ModelLoadError, match=f"end of tensor {last}"):
        GgufFile(cut)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
    (tmp_path / "y.gguf").write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelLoadError, match="version 9"):
        GgufFile(tmp_path / "y.gguf")
