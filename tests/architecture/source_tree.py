"""What is written in the repository: files, definitions, imports. Read from the sources, nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("weir", "gateway", "prefill_service", "decode_service", "kv_transfer", "kernels", "protos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`module` is dotted; `is_typing_only` when it is never executed."""

    path: Path
    line: int
    module: str
    is_typing_only: bool


def source_files() -> list[Path]:
    """Our own Python files, generated code left out; relative to the root."""
    found = (path for folder in TOP_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found if "_pb2" not in path.name)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def folder_of(path: Path) -> str:
    """The row of the floor table that a file belongs to."""
    if path.parts[0] == "weir" and len(path.parts) > 2:
        return "/".join(path.parts[:2])
    return path.parts[0]


def imports_of(path: Path) -> Iterator[Import]:
    """Every import, also those inside of functions."""
    yield from _walk(path, tree_of(path), is_typing_only=False)


def _walk(path: Path, node: ast.AST, *, is_typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(path=path, line=node.lineno, module=alias.name, is_typing_only=is_typing_only)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None, f"{path}:{node.lineno}: relative import"
        for alias in node.names:
            module = f"{node.module}.{alias.name}" if node.module == "weir" else node.module
            yield Import(path=path, line=node.lineno, module=module, is_typing_only=is_typing_only)
    for child in ast.iter_child_nodes(node):
        in_block = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _walk(path, child, is_typing_only=is_typing_only or in_block)


@cache
def defined_names() -> frozenset[str]:
    """Names that exist: files and folders, classes, functions, their members, constants, messages of the protocols."""
    names: set[str] = set()
    for path in source_files():
        names.update({path.stem, *path.parts, str(path), str(path.with_suffix("")).replace("/", ".")})
        names.update(str(parent) for parent in path.parents)
        names.update(_definitions(tree_of(path), prefix=""))
    for proto in (ROOT / "protos").glob("*.proto"):
        names.add(str(proto.relative_to(ROOT)))
        for line in proto.read_text().splitlines():
            words = line.replace("(", " ").split()
            if words[:1] and words[0] in ("message", "service", "rpc", "enum"):
                names.add(words[1])
    return frozenset(names)


def _definitions(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from {child.name, prefix + child.name}
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, prefix=f"{child.name}.")
            else:
                yield from (argument.arg for argument in (*child.args.args, *child.args.kwonlyargs))
                yield from _definitions(child, prefix=prefix)
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield from {target.id, prefix + target.id}
        elif isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _definitions(child, prefix=prefix)
