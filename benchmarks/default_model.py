"""The default model on this machine: start time, memory of each process, TTFT and tokens/s at 1, 8 and 32 streams,
beside transformers' `generate`, in one interleaved run.

    python -m benchmarks.default_model [--repeats 3] [--output docs/measured.md]

Starts `weir up`, loads transformers and runs `weir bench`, each as a process of its own, so that none shares memory
with another. Loopback only; every loop is bounded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.bench_process import run_bench
from benchmarks.comparison import Spread
from benchmarks.machine import describe_machine
from benchmarks.server_process import ServerProcess, process_memory_mib, weir_up

SERVICES = ("prefill_service", "decode_service", "gateway", "valkey", "weir.cli")
BENCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams at a time, each time two waves of them."""

    streams: int
    input_tokens: int
    output_tokens: int

    @property
    def bench_options(self) -> tuple[str, ...]:
        options = {
            "concurrency": self.streams,
            "num-requests": max(2 * self.streams, 8),
            "input-tokens": self.input_tokens,
            "output-tokens": self.output_tokens,
        }
        return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))

    def __str__(self) -> str:
        return f"{self.streams}, {self.input_tokens} in, {self.output_tokens} out"


LOADS = (
    Load(streams=1, input_tokens=128, output_tokens=64),
    Load(streams=8, input_tokens=128, output_tokens=64),
    Load(streams=32, input_tokens=64, output_tokens=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One load in one repetition: output tokens a second each, and seconds to Weir's first tokens."""

    weir: float
    ttft_p50_s: float
    one_by_one: float
    in_one_batch: float


class TransformersPeer:
    """transformers' `generate` in a process of its own, with the same weights in fp32."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls, child = context.Pipe()
        self._process = context.Process(target=_serve_transformers, args=(child,), daemon=True)
        started_s = time.monotonic()
        self._process.start()
        self._calls.recv()
        self.start_s = time.monotonic() - started_s

    def generate(self, load: Load, *, num_prompts: int, batch_size: int) -> float:
        """Output tokens a second for prompts of the load's lengths, in one batch after the other."""
        self._calls.send((load.input_tokens, load.output_tokens, num_prompts, batch_size))
        return num_prompts * load.output_tokens / float(self._calls.recv())

    def memory_mib(self) -> float:
        assert self._process.pid is not None
        return process_memory_mib(self._process.pid)

    def stop(self) -> None:
        self._calls.send(None)
        self._process.join(30)


def _serve_transformers(calls: Any) -> None:
    import torch

    from tests.fakes.real_model import prepare_real_model
    from tests.fakes.reference_model import load_prepared_reference

    model = load_prepared_reference(prepare_real_model())
    generator = torch.Generator().manual_seed(0)
    calls.send("ready")
    while (call := calls.recv()) is not None:
        input_tokens, output_tokens, num_prompts, batch_size = call
        prompts = torch.randint(1000, 40_000, (num_prompts, input_tokens), generator=generator)
        started_s = time.monotonic()
        with torch.inference_mode():
            for batch in prompts.split(batch_size):
                model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    max_new_tokens=output_tokens,
                    min_new_tokens=output_tokens,
                    do_sample=False,
                )
        calls.send(time.monotonic() - started_s)


def measure(repeats: int) -> str:
    """The whole run; returns the page."""
    with weir_up():
        pass  # the model is prepared and the files are in the page cache: a second start is measured
    with ExitStack() as at_end:
        weir = at_end.enter_context(weir_up())
        peer = TransformersPeer()
        at_end.callback(peer.stop)
        rounds: dict[Load, list[Round]] = {load: [] for load in LOADS}
        for repeat in range(repeats):
            for load, done in rounds.items():
                done.append(measure_round(weir, peer, load))
                print(f"repeat {repeat + 1}, {load}: {done[-1]}", flush=True)
        return _page(weir, _memory_by_service(weir), peer, rounds)


def measure_round(weir: ServerProcess, peer: TransformersPeer, load: Load) -> Round:
    """One after the other, so that each has the machine to itself."""
    record = run_bench(weir.url, *load.bench_options, timeout_s=BENCH_TIMEOUT_S)
    assert record["num_failed"] == 0, record["failures"]
    return Round(
        weir=record["output_tokens_per_s"],
        ttft_p50_s=record["ttft_s"]["p50"],
        # One after the other costs the same for each prompt: few stand for all.
        one_by_one=peer.generate(load, num_prompts=min(load.streams, 4), batch_size=1),
        in_one_batch=peer.generate(load, num_prompts=load.streams, batch_size=load.streams),
    )


def _memory_by_service(weir: ServerProcess) -> dict[str, float]:
    found: dict[str, float] = {}
    for pid, size_mib in weir.memory_mib().items():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        name = next((service for service in SERVICES if service in command), command.split()[0])
        found[name] = found.get(name, 0.0) + size_mib
    return found


def _page(
    weir: ServerProcess, memory: Mapping[str, float], peer: TransformersPeer, rounds: Mapping[Load, Sequence[Round]]
) -> str:
    repeats = len(rounds[LOADS[0]])
    lines = [
        "# The default model on a small CPU machine",
        "",
        f"`python -m benchmarks.default_model` on {date.today().isoformat()}: {describe_machine()}. "
        "SmolLM2-135M-Instruct (a Q4_1 file: Weir computes with its four and eight bits, transformers in fp32), one "
        "prefill and one decode worker, over HTTP, measured by `weir bench`; output tokens a second, beside "
        f"transformers' `generate` without a server. Medians of {repeats} interleaved repetitions, lowest and highest "
        "in brackets; the machine is shared, so ratios say more than figures.",
        "",
        "| streams | Weir, tok/s | Weir, TTFT p50, s | transformers one by one, tok/s "
        "| transformers in one batch, tok/s | Weir / one by one | Weir / one batch |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for load, done in rounds.items():
        columns = (
            Spread.over([one.weir for one in done]).show(1),
            Spread.over([one.ttft_p50_s for one in done]).show(2),
            Spread.over([one.one_by_one for one in done]).show(1),
            Spread.over([one.in_one_batch for one in done]).show(1),
            Spread.over([one.weir / one.one_by_one for one in done]).show(1),
            Spread.over([one.weir / one.in_one_batch for one in done]).show(1),
        )
        lines.append(f"| {load} | {' | '.join(columns)} |")
    lines += [
        "",
        "| process | memory, MiB (PSS, after the load) |",
        "| --- | --- |",
        *(f"| {name} | {size:.0f} |" for name, size in sorted(memory.items())),
        f"| all of Weir | {sum(memory.values()):.0f} |",
        f"| transformers | {peer.memory_mib():.0f} |",
        "",
        f"Start to ready, second start: Weir, all processes, {weir.start_s:.1f} s; transformers {peer.start_s:.1f} s.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    page = measure(args.repeats)
    print(page)
    if args.output:
        args.output.write_text(page)


if __name__ == "__main__":
    main()
