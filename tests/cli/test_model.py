from __future__ import annotations

import json
from pathlib import Path

import pytest

from weir import __version__
from weir.cli.__main__ import main
from weir.core.model_card import CARD_FILE, ModelCard

CARD = ModelCard(
    name="tiny",
    architecture="LlamaForCausalLM",
    max_model_len=8192,
    vocab_size=49152,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    num_parameters=134_515_008,
    eos_token_ids=(2,),
    bos_token_id=1,
    add_bos_token=False,
    weights_hash="ab",
    created_s=1,
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model_dir = tmp_path / "models" / "tiny"
    model_dir.mkdir(parents=True)
    (model_dir / CARD_FILE).write_text(CARD.to_json())
    return tmp_path


def test_list_has_a_line_for_each_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--home", str(home), "list"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "DIRECTORY"]
    assert line.split()[:5] == ["tiny", "LlamaForCausalLM", "135", "M", "8,192"]


def test_list_of_nothing_says_how_to_get_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--home", str(tmp_path), "list"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "weir model pull smollm2" in captured.err


@pytest.mark.parametrize("by", ["name", "directory"])
def test_inspect_prints_the_card(home: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    name = "tiny" if by == "name" else str(home / "models" / "tiny")
    assert main(["model", "--home", str(home), "inspect", name]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields.pop("model_dir") == str(home / "models" / "tiny")
    assert ModelCard.from_json(json.dumps(fields)) == CARD


def test_inspect_of_an_unknown_model_names_those_there_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--home", str(home), "inspect", "huge"]) == 2
    assert capsys.readouterr().err == f"weir model: no model 'huge' in {home}; there: tiny\n"


def test_pull_of_nothing_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--home", str(tmp_path), "pull", str(tmp_path / "gone.gguf")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("weir model: ")
    assert "gone.gguf" in last


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weir {__version__}\n"


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    err = capsys.readouterr().err
    assert "'fly'" in err
    assert "chat" in err
