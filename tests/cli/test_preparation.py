"""What `weir up` gets ready before it starts workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from weir.cli import preparation

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "tiny 1.0" && exit
{body}
for argument in "$@"; do
    [ "$last" = -o ] && echo built > "$argument"
    last=$argument
done
"""

pytestmark = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a machine with a GPU compiles nothing")


@pytest.mark.parametrize(("body", "is_built"), [("", True), ("echo no such luck >&2; exit 1", False)])
async def test_kernels_are_compiled_once_and_a_compiler_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, is_built: bool
) -> None:
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(body=body))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    said: list[str] = []
    await preparation.compile_kernels(tmp_path / "kernels", progress=said.append)
    assert said[0].startswith("compiling the CPU kernels")
    assert len(list((tmp_path / "kernels").glob("*.so"))) == is_built
    if not is_built:
        assert len(said) == 2
        assert said[1].endswith("failed: no such luck")
    else:
        said.clear()
        await preparation.compile_kernels(tmp_path / "kernels", progress=said.append)
        assert not said, "it is there"
