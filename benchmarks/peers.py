"""Weir beside the other servers of this machine, over HTTP, on the workloads W1 to W5 of `weir bench`.

    python -m benchmarks.peers [--llama-server PATH] [--vllm PATH] [--transformers PATH] [--openvino-python PATH]
                               [--gguf FILE ...] [--repeats 3] [--go-on RECORD] [--quick]

Peers are those on PATH or given; none is installed. Each server runs alone: started, warmed up, measured, ended; then
the next, and all of them again for each repetition. Every loop is bounded in count and time, and a server that fails is
a row with a remark. Loopback only. Prints a table; the record goes to benchmarks/results/ after each server, so that a
run that was cut off can be gone on with.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_process import ROOT, BenchFailed, run_bench
from benchmarks.comparison import THROUGHPUTS, Measure, ServerRun
from benchmarks.contenders import ALL_WORKLOADS, Contender, Models, Programs, contenders
from benchmarks.other_processes import OtherProcesses, await_calm
from benchmarks.peers_record import PeersRecord
from benchmarks.server_process import ServerFailed, ServerProcess, server_process
from weir.cli.preparation import prepare_model
from weir.cli.up_config import UpConfig
from weir.runtime.config import load_config

RESULTS = ROOT / "benchmarks" / "results"
START_TIMEOUT_S = 600.0
"""vLLM compiles for minutes when it meets a model for the first time."""
MAX_OTHERS_SHARE = 0.05
"""Of the cores; a workload that others disturbed more is measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and what bounds it.

    Attributes:
        begin_s: no request of a workload begins later.
        request_s: longest time of one request.
        calm_s: longest wait, before a workload, for a second in which nobody else computes.
        num_tries: of a workload that others disturb.
    """

    num_repetitions: int
    workloads: tuple[str, ...] = ALL_WORKLOADS
    begin_s: float = 180.0
    request_s: float = 180.0
    calm_s: float = 60.0
    num_tries: int = 3

    @property
    def workload_s(self) -> float:
        """Longest time of one workload: the warm-up, and for W5 two runs, each of which may end with a request."""
        return self.begin_s + 3 * self.request_s + 30.0


QUICK = Plan(num_repetitions=1, workloads=("w1", "w3"), begin_s=3.0, request_s=60.0, calm_s=0.0, num_tries=1)


def run(chosen: Sequence[Contender], plan: Plan, tokenizer_dir: Path, *, first: int = 0) -> Iterator[ServerRun]:
    """All repetitions from number `first` on, one server after the other in each."""
    for contender in chosen:  # caches on disk are filled and files in memory: a second start is measured
        with (
            suppress(ServerFailed),
            server_process(contender.command, ready_path=contender.ready_path, timeout_s=START_TIMEOUT_S) as server,
        ):
            print(f"{contender.name}: first start {server.start_s:.1f} s", flush=True)
    for repetition in range(first, first + plan.num_repetitions):
        for contender in chosen:
            print(f"repetition {repetition + 1}: {contender.name}", flush=True)
            one = measure(contender, plan, repetition, tokenizer_dir)
            for remark in one.remarks:
                print(f"  {remark}", flush=True)
            yield one


def measure(contender: Contender, plan: Plan, repetition: int, tokenizer_dir: Path) -> ServerRun:
    """Start one server, run its share of the workloads, end it."""
    figures: dict[Measure, float] = {}
    remarks: list[str] = []
    try:
        with server_process(contender.command, ready_path=contender.ready_path, timeout_s=START_TIMEOUT_S) as server:
            figures[Measure.START] = server.start_s
            for workload in plan.workloads:
                if workload not in contender.workloads:
                    continue
                try:
                    result, others_share = bench_undisturbed(contender, server, workload, plan, tokenizer_dir)
                except BenchFailed as exc:
                    remarks.append(f"{workload}: {exc}")
                    continue
                figures |= figures_of(result)
                remarks += remarks_on(result, others_share)
                print(f"  {workload}: {_progress(result)}; others {others_share:.0%}", flush=True)
            if memory_mib := sum(server.memory_mib().values()):
                figures[Measure.MEMORY] = memory_mib
            else:
                remarks.append("the server ended while it was measured")
    except ServerFailed as exc:
        remarks.append(str(exc))
    return ServerRun(server=contender.name, repetition=repetition, figures=figures, remarks=remarks)


def bench_undisturbed(
    contender: Contender, server: ServerProcess, workload: str, plan: Plan, tokenizer_dir: Path
) -> tuple[dict[str, Any], float]:
    """The record of the run that other processes of the machine disturbed least, and their share of its cores.

    Raises:
        BenchFailed: a run measured nothing.
    """
    tries: list[tuple[float, dict[str, Any]]] = []
    while len(tries) < plan.num_tries and all(share > MAX_OTHERS_SHARE for share, _ in tries):
        await_calm(server, share=MAX_OTHERS_SHARE, timeout_s=plan.calm_s)
        others = OtherProcesses(server)
        result = bench(contender, server.url, workload, plan, tokenizer_dir)
        tries.append((others.share(), result))
    others_share, result = min(tries, key=lambda one: one[0])
    return result, others_share


def bench(contender: Contender, url: str, workload: str, plan: Plan, tokenizer_dir: Path) -> dict[str, Any]:
    """The record of one workload. Raises BenchFailed."""
    return run_bench(
        url,
        *("--workload", workload, "--tokenizer", str(tokenizer_dir)),
        *("--prompt-kind", "tokens" if contender.takes_token_ids else "text"),
        *("--ignore-eos", str(contender.does_ignore_eos).lower()),
        *("--max-duration-s", f"{plan.begin_s:g}", "--timeout-s", f"{plan.request_s:g}"),
        timeout_s=plan.workload_s,
    )


def figures_of(result: dict[str, Any]) -> dict[Measure, float]:
    """What the table takes of a record of `weir bench`."""
    workload = result["workload"]
    if workload == "w5":
        found = {
            Measure.W5_ALONE: result["alone"]["itl_p99_s"],
            Measure.W5_BURST: result["burst"]["itl_p99_s"],
            Measure.W5_TTFT: result["burst"]["ttft_p50_s"],
        }
    else:
        throughput = Measure(f"{workload}_tokens_per_s")
        found = {
            throughput: result["output_tokens_per_s"],
            THROUGHPUTS[throughput]: result["goodput_requests_per_s"],
        }
    return {measure: figure for measure, figure in found.items() if figure is not None}


def remarks_on(result: dict[str, Any], others_share: float) -> list[str]:
    """What is not as it was asked for."""
    workload, remarks = result["workload"], []
    if result["failures"]:
        reasons = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items())
        remarks.append(f"{workload}: {result['num_failed']} of {result['num_requests']} requests failed ({reasons})")
    if not result["complete"]:
        remarks.append(f"{workload}: cut short after {result['num_requests']} requests")
    remarks += [f"{workload}: {note}" for note in result["notes"]]
    if others_share > MAX_OTHERS_SHARE:
        remarks.append(f"{workload}: other processes took {others_share:.0%} of the cores")
    return remarks


def _progress(result: dict[str, Any]) -> str:
    return ", ".join(f"{measure.value} {figure:.3g}" for measure, figure in figures_of(result).items())


@contextmanager
def models(gguf: Sequence[Path]) -> Iterator[Models]:
    """The default model as every server takes it, and `gguf` beside it."""
    home = load_config(UpConfig, (), prog="weir up").home.expanduser().resolve()
    prepared = asyncio.run(prepare_model("smollm2", home=home, progress=print))
    with tempfile.TemporaryDirectory(prefix="weir-peers-") as directory:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.float32_directory", str(prepared.model_dir), directory],
            cwd=ROOT,
            check=True,
        )
        yield Models(
            gguf=(*sorted(prepared.model_dir.glob("*.gguf")), *gguf),
            float32_dir=Path(directory),
            tokenizer_dir=prepared.model_dir,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--vllm", type=Path, metavar="PATH")
    parser.add_argument("--transformers", type=Path, metavar="PATH")
    parser.add_argument("--openvino-python", type=Path, metavar="PATH", help="a Python that has openvino_genai")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="more files of the model, such as Q8_0")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="just these servers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--go-on", type=Path, metavar="RECORD", help="add repetitions to those of an earlier run")
    parser.add_argument("--quick", action="store_true", help="one short repetition of W1 and W3: does it all work?")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    programs = Programs.find(
        llama_server=args.llama_server,
        vllm=args.vllm,
        transformers=args.transformers,
        openvino_python=args.openvino_python,
    )
    for name in programs.missing:
        print(f"not installed: {name}", flush=True)
    record = PeersRecord.load(args.go_on) if args.go_on else PeersRecord(missing=programs.missing)
    path = args.go_on or RESULTS / f"{record.date}-peers.json"
    plan = QUICK if args.quick else Plan(num_repetitions=args.repeats)
    with models(args.gguf) as found:
        chosen = [one for one in contenders(programs, found) if not args.only or one.name in args.only]
        record.add_servers(chosen)
        for one in run(chosen, plan, found.tokenizer_dir, first=record.num_repetitions):
            record.runs.append(one)
            if not args.quick:
                record.save(path)
    text = record.page()
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
