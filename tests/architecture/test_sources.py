"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.architecture.source_tree import ROOT, source_files, tree_of

MAX_LINES = 450
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc"}
BANNED_ON_ASYNCIO = {"create_task", "gather", "ensure_future", "wait_for"}


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in source_files():
        for node in ast.walk(tree_of(path)):
            yield path, node


def _where(is_wrong: Callable[[Path, ast.AST], bool]) -> list[str]:
    return [f"{path}:{getattr(node, 'lineno', 1)}" for path, node in _nodes() if is_wrong(path, node)]


def test_only_the_configuration_reads_the_environment() -> None:
    def reads(path: Path, node: ast.AST) -> bool:
        if path == Path("weir/runtime/config.py"):
            return False
        is_attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
        return is_attribute or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ("environ", "getenv") for alias in node.names)
        )

    assert _where(reads) == []


def test_every_task_has_an_owner() -> None:
    def starts_loose_task(path: Path, node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr not in BANNED_ON_ASYNCIO:
            return False
        owner = ast.unparse(node.value)
        return owner == "asyncio" or "loop" in owner.lower()

    assert _where(starts_loose_task) == []


def test_files_stay_short() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in source_files()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_file_names_say_what_is_in_them() -> None:
    assert [path for path in source_files() if path.stem in NAMES_THAT_SAY_NOTHING] == []


def test_every_module_says_what_it_is() -> None:
    modules = [path for path in source_files() if path.name != "__init__.py"]
    assert [path for path in modules if not ast.get_docstring(tree_of(path))] == []


def test_nothing_is_left_to_be_done() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert [str(path) for path in source_files() if any(mark in (ROOT / path).read_text() for mark in marks)] == []
