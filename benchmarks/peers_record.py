"""What `benchmarks.peers` has measured so far: a file that a later run goes on with, and the page made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.comparison import Comparison, Kind, ServerRun
from benchmarks.contenders import Contender
from benchmarks.machine import describe_machine


@dataclass(kw_only=True)
class PeersRecord:
    """All runs of all servers, of one machine and one state of the program.

    Attributes:
        kinds, settings: of each server by its name, in the order of the rows.
        missing: peers that were not installed.
    """

    date: str = field(default_factory=lambda: date.today().isoformat())
    machine: str = field(default_factory=describe_machine)
    kinds: dict[str, Kind] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    runs: list[ServerRun] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> PeersRecord:
        """What `save` wrote."""
        content: Mapping[str, Any] = json.loads(path.read_text())
        return cls(
            date=content["date"],
            machine=content["machine"],
            kinds={name: Kind(server["kind"]) for name, server in content["servers"].items()},
            settings={name: server["settings"] for name, server in content["servers"].items()},
            missing=content["missing"],
            runs=[ServerRun.from_dict(one) for one in content["runs"]],
        )

    def save(self, path: Path) -> None:
        servers = {name: {"kind": kind.value, "settings": self.settings[name]} for name, kind in self.kinds.items()}
        content = {
            "date": self.date,
            "machine": self.machine,
            "servers": servers,
            "missing": list(self.missing),
            "runs": [one.to_dict() for one in self.runs],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def add_servers(self, contenders: Iterable[Contender]) -> None:
        for contender in contenders:
            self.kinds[contender.name] = contender.kind
            self.settings[contender.name] = contender.settings

    @property
    def num_repetitions(self) -> int:
        return max((one.repetition + 1 for one in self.runs), default=0)

    def page(self) -> str:
        """The whole report, in Markdown."""
        measured = {one.server for one in self.runs}
        kinds = {name: kind for name, kind in self.kinds.items() if name in measured}
        comparison = Comparison(kinds, self.runs)
        return "\n".join(
            [
                "# Weir beside its peers on a small CPU machine",
                "",
                f"`python -m benchmarks.peers` on {self.date}: {self.machine}. SmolLM2-135M-Instruct, over HTTP, "
                f"workloads of `weir bench`. Interleaved repetitions: {self.num_repetitions}; of several, medians, "
                "lowest and highest in brackets. The machine is shared, so ratios say more than figures. Goodput: "
                "requests with TTFT under 2 s and TPOT under 100 ms. Memory: proportional set size of all processes of "
                "a server after its load. Start: all processes, files in the page cache.",
                "",
                "What the workloads are: [benchmarking.md](benchmarking.md). Q8_0 and Q4_1 are formats of GGUF files, "
                "of eight and four bits a weight.",
                "",
                comparison.table(),
                "",
                "Settings:",
                "",
                *(f"- {name}: {self.settings[name]}" for name in kinds),
                *(f"- {name}: not installed" for name in self.missing),
                "",
                *(f"- {remark}" for remark in comparison.remarks()),
                "",
            ]
        )
