from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.source_tree import ROOT


def test_generated_code_is_what_the_protocols_say(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    with_service = [proto for proto in protos if "\nservice " in (ROOT / proto).read_text()]
    _generate(tmp_path, ("python", "mypy"), protos)
    _generate(tmp_path, ("grpc_python",), with_service)
    made = {file.name: file.read_text() for file in (tmp_path / "protos").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "protos").glob("*_pb2*")}
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == [], "run `make protos`"


def _generate(folder: Path, kinds: tuple[str, ...], protos: list[str]) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *(f"--{kind}_out={folder}" for kind in kinds), *protos],
        cwd=ROOT,
        check=True,
        env={**os.environ, "PATH": path},
        timeout=60,
        stderr=subprocess.PIPE,
    )
