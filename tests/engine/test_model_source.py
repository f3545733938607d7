"""Downloads, by the real hub client against a stand-in on loopback. The client reads its endpoint once, so each
download is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.gguf_model import write_tiny_gguf
from tests.fakes.hub_server import HubServer, hub_server
from tests.fakes.tiny_model import write_tiny_model
from weir.core.model_card import ModelCard

ROOT = Path(__file__).parents[2]


def download(server: HubServer, source: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home / "hub")}
    command = [sys.executable, "-m", "weir.engine.prepare", source, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_hub_model_is_downloaded_once_and_only_what_is_needed(tmp_path: Path) -> None:
    repo = write_tiny_model(tmp_path / "repo", num_shards=2)
    (repo / "README.md").write_text("not needed")
    (repo / "pytorch_model.bin").write_bytes(bytes(1000))
    with hub_server("org/tiny", repo) as server:
        result = download(server, "hf:org/tiny", tmp_path / "home")
        assert result.returncode == 0, result.stderr
        assert "downloading org/tiny" in result.stderr
        model_dir = Path(json.loads(result.stdout)["model_dir"])
        assert ModelCard.load(model_dir).name == "org/tiny"
        assert sorted(set(server.fetched)) == [
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        server.fetched.clear()
        assert download(server, "hf:org/tiny", tmp_path / "home").returncode == 0
        assert server.fetched == []


def test_one_gguf_of_a_hub_repository_is_downloaded_alone(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    write_tiny_gguf(tmp_path / "repo" / "Tiny-F16.gguf", quantization="F16")
    (tmp_path / "repo" / "Tiny-Q8_0.gguf").write_bytes(b"another")
    with hub_server("org/tiny-GGUF", tmp_path / "repo") as server:
        result = download(server, "hf:org/tiny-GGUF:Tiny-F16.gguf", tmp_path / "home")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["name"] == "Tiny"
        assert set(server.fetched) == {"Tiny-F16.gguf"}
        missing = download(server, "hf:org/tiny-GGUF:Tiny-Q2_K.gguf", tmp_path / "home")
        assert missing.returncode == 2
        assert "org/tiny-GGUF has no file Tiny-Q2_K.gguf" in missing.stderr


def test_a_repository_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with hub_server("org/tiny", tmp_path) as server:
        result = download(server, "hf:org/other", tmp_path / "home")
    assert result.returncode == 2
    assert "error: hf:org/other: cannot be downloaded" in result.stderr
    assert "Traceback" not in result.stderr
