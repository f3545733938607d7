"""`weir model pull|list|inspect`: the models that are prepared on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weir.cli.preparation import prepare_model
from weir.core.errors import ModelLoadError
from weir.core.model_card import CARD_FILE, ModelCard
from weir.runtime.config import load_config, setting


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where models are kept."""

    home: Path = setting(Path("~/.cache/weir"), help="where models and logs are kept")


def model(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises ModelLoadError naming what is missing or broken."""
    parser = argparse.ArgumentParser(prog="weir model", description="Models that are prepared on this machine.")
    parser.add_argument("--home", metavar="DIR", help="where models are kept [WEIR_HOME]")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    pull = commands.add_parser("pull", help="download and prepare a model")
    pull.add_argument("source", help="a directory, a .gguf file, hf:org/name, or a known name")
    pull.add_argument("--name", help="what clients call it; default: taken from the source")
    commands.add_parser("list", help="one line for each model")
    inspect = commands.add_parser("inspect", help="the card of one model, as JSON")
    inspect.add_argument("name", help="a name of `weir model list`, or a prepared directory")
    arguments = parser.parse_args(argv)
    flags = ["--home", arguments.home] if arguments.home else []
    home = load_config(ModelConfig, flags, prog="weir model").home.expanduser().resolve()
    if arguments.command == "pull":
        return _pull(arguments.source, arguments.name, home)
    if arguments.command == "list":
        return _list(home)
    return _inspect(arguments.name, home)


def _pull(source: str, name: str | None, home: Path) -> int:
    def show(line: str) -> None:
        print(line, file=sys.stderr)

    prepared = asyncio.run(prepare_model(source, home=home, progress=show, name=name))
    print(f"{prepared.name} is ready in {prepared.model_dir}")
    return 0


def _list(home: Path) -> int:
    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "ARCHITECTURE", "PARAMETERS", "CONTEXT", "DIRECTORY"):
        table.add_column(heading, overflow="fold")
    found = list(_prepared(home))
    for model_dir, card in found:
        parameters = f"{card.num_parameters / 1e6:,.0f} M"
        table.add_row(card.name, card.architecture, parameters, f"{card.max_model_len:,}", str(model_dir))
    if found:
        console = Console()
        console.width = max(console.width, 160) if not console.is_terminal else console.width
        console.print(table)
    else:
        print(f"no models in {home}; `weir model pull smollm2` gets one", file=sys.stderr)
    return 0


def _inspect(name: str, home: Path) -> int:
    if (Path(name) / CARD_FILE).is_file():
        model_dir, card = Path(name), ModelCard.load(Path(name))
    else:
        known = {card.name: (model_dir, card) for model_dir, card in _prepared(home)}
        if name not in known:
            raise ModelLoadError(f"no model {name!r} in {home}; there: {', '.join(sorted(known)) or 'none'}")
        model_dir, card = known[name]
    print(json.dumps({**asdict(card), "model_dir": str(model_dir)}, indent=2))
    return 0


def _prepared(home: Path) -> Iterator[tuple[Path, ModelCard]]:
    for path in sorted((home / "models").glob(f"[!.]*/{CARD_FILE}")):
        yield path.parent, ModelCard.load(path.parent)
