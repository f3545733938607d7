"""What the documentation names exists, and what exists in the configuration is documented."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from decode_service.config import DecodeConfig
from gateway.config import GatewayConfig
from prefill_service.config import PrefillConfig
from tests.architecture.source_tree import ROOT, defined_names
from weir.cli.bench_config import BenchConfig
from weir.cli.chat import ChatConfig
from weir.cli.up_config import UpConfig
from weir.worker.config import WorkerConfig

PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))]
COMMANDS = {"weir up", "weir chat", "weir model", "weir bench"}
CONFIGS = {
    "weir up": UpConfig,
    "Gateway": GatewayConfig,
    "Every worker": WorkerConfig,
    "Prefill workers": PrefillConfig,
    "Decode workers": DecodeConfig,
    "weir chat": ChatConfig,
    "weir bench": BenchConfig,
}


def _prose(page: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def _names(page: Path) -> Iterator[str]:
    yield from re.findall(r"`([^`\n]+)`", _prose(page))


def _exists(name: str) -> bool:
    return name in defined_names() or name in COMMANDS or (ROOT / name).exists()


def test_every_name_in_the_structure_page_exists() -> None:
    assert [name for name in _names(Path("docs/structure.md")) if not _exists(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (ROOT / page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|[`\n])(?:\S+=\S+ )?make ([a-z-]+)", (ROOT / page).read_text()))
    assert named <= targets


@pytest.mark.parametrize("heading", CONFIGS)
def test_every_setting_is_documented_with_its_default(heading: str) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("| `")]
    assert documented == _rows(CONFIGS[heading])


def _rows(config: type[Any]) -> list[str]:
    """One row a setting of this class that its base does not have."""
    bases = [base for base in config.__mro__[1:] if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    return [
        f"| `{field.name}` | {_default(field)} | {field.metadata['help']}{_limits(field)} |"
        for field in dataclasses.fields(config)
        if field.name not in inherited
    ]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if isinstance(field.default, tuple):
        return ", ".join(field.default) or "none"
    if isinstance(field.default, Enum):
        return str(field.default.value)
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return "none" if field.default in (None, "") else str(field.default)


def _limits(field: dataclasses.Field[Any]) -> str:
    minimum, maximum, choices = (field.metadata[name] for name in ("minimum", "maximum", "choices"))
    if choices:
        return f" ({', '.join(choices)})"
    if minimum is not None and maximum is not None:
        return f" ({minimum:g} to {maximum:g})"
    return f" (at least {minimum:g})" if minimum is not None else ""
