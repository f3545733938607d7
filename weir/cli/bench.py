"""`weir bench`: measures a server and says what it found, to a person and as JSON.

Ctrl-C ends the measurement with the results so far.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import Sequence

import uvloop
from rich.console import Console

from weir import __version__
from weir.bench.benchmark import INTERRUPT, Benchmark, run_benchmark
from weir.bench.corpus import Corpus
from weir.bench.request_plan import Sampling
from weir.bench.result import BenchResult
from weir.bench.token_codec import LocalCodec
from weir.cli.bench_config import STANDARD_OUTPUT, BenchConfig
from weir.cli.bench_progress import BenchProgress
from weir.cli.bench_tables import failure_lines, print_tables
from weir.runtime.config import load_config

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130


def bench(argv: Sequence[str]) -> int:
    """Measure and report; returns the exit code: 1 when a request failed, 130 when it was interrupted.

    Raises:
        WeirError: a setting is wrong, no server answers, or the warm-up failed.
    """
    config = load_config(BenchConfig, argv, prog="weir bench")
    salt = config.drawn_salt()
    benchmark = Benchmark(
        address=config.address(),
        workload=config.shape(),
        corpus=Corpus.load(config.text_file),
        salt=salt,
        codec=LocalCodec.load(config.tokenizer) if config.tokenizer is not None else None,
        model=config.model,
        endpoint=config.endpoint,
        prompt_kind=config.kind_of_prompts(),
        sampling=Sampling(temperature=config.temperature, seed=config.seed, ignore_eos=config.ignore_eos),
        limits=config.limits(),
        num_warmups=config.warmup,
        max_duration_s=config.max_duration_s if config.max_duration_s is not None else float("inf"),
        timeout_s=config.timeout_s,
    )
    with BenchProgress(is_quiet=config.quiet) as progress:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(run_benchmark(benchmark, progress))
        except KeyboardInterrupt:
            print("weir bench: interrupted before the measurement began", file=sys.stderr)
            return EXIT_INTERRUPTED
    _write(result, config, salt)
    if not config.quiet:
        print_tables(result, _TableConsole(stderr=config.json == STANDARD_OUTPUT, highlight=False))
    for line in failure_lines(result) if config.quiet else ():
        print(f"weir bench: {line}", file=sys.stderr)
    if result.stopped_by == INTERRUPT:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if result.summary.num_failed else 0


class _TableConsole(Console):
    """Says that its reader has gone as the rest of the command line does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _write(result: BenchResult, config: BenchConfig, salt: str) -> None:
    if config.json is None:
        return
    versions = {"weir": __version__, "python": platform.python_version(), "platform": platform.platform()}
    document = json.dumps(
        result.to_dict(config={**config.described(), "salt": salt}, versions=versions), indent=1, allow_nan=False
    )
    if config.json == STANDARD_OUTPUT:
        sys.stdout.write(document + "\n")
    else:
        config.json.write_text(document + "\n", encoding="utf-8")
