"""The command against a scripted server: what it prints, what it writes, how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.architecture.source_tree import ROOT
from tests.fakes.completion_server import Call, CompletionServer, answer_in_full
from tests.fakes.http_server import until
from weir.bench.exchange import Exchange
from weir.bench.failure import Failure
from weir.bench.request_plan import RequestPlan
from weir.bench.workload import PRESETS
from weir.cli.__main__ import EXIT_BROKEN_PIPE, main
from weir.cli.bench_config import BenchConfig
from weir.cli.bench_progress import BenchProgress
from weir.runtime.config import load_config

SMALL = ("--input-tokens", "16", "--output-tokens", "4", "--num-requests", "6", "--concurrency", "2")


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with CompletionServer() as server:
        yield server


async def bench(server: CompletionServer, *options: str) -> int:
    """The command in a thread, beside the loop that its server runs on."""
    return await asyncio.to_thread(main, ["bench", "--base-url", server.url, *options])


def config_of(*argv: str, environ: dict[str, str] | None = None) -> BenchConfig:
    return load_config(BenchConfig, argv, prog="weir bench", environ=environ or {})


async def test_a_measurement_is_a_table(server: CompletionServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server, *SMALL) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "custom: 6 requests, 2 at a time, 16 in, 4 out; scripted"
    assert lines[1].split() == ["ms", "mean", "p50", "p90", "p99", "max"]
    assert [line.split()[0] for line in lines[2:6]] == ["TTFT", "TPOT", "ITL", "E2EL"]
    assert lines[6].startswith("requests  6 done, 0 failed in ")
    assert lines[7].startswith("tokens    24 out: ")
    assert lines[8].startswith("goodput ")
    assert lines[8].endswith(" requests /s, 100% of all, within TTFT 2 s, TPOT 0.1 s")
    assert captured.err == "weir bench: main: 6 requests\n"


async def test_all_of_it_is_json(server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert await bench(server, *SMALL, "--json", str(path), "--quiet", "--api-key", "hunter2", "--salt", "s") == 0
    assert capsys.readouterr() == ("", "")
    raw = path.read_text()
    assert "hunter2" not in raw
    document: dict[str, Any] = json.loads(raw)
    assert (document["schema"], document["workload"], document["complete"]) == (1, "custom", True)
    assert (document["num_requests"], document["num_failed"], len(document["requests"])) == (6, 0, 6)
    assert document["config"]["salt"] == "s"
    assert document["config"]["input_tokens"] == "16"
    assert document["config"]["prompt_kind"] == "tokens"
    assert document["versions"]["server"] == "version 1.2.3"
    assert server.calls[0].headers["authorization"] == "Bearer hunter2"


async def test_json_may_go_to_the_standard_output(server: CompletionServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server, *SMALL, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_requests"] == 6
    assert "TTFT" in captured.err


async def test_a_reader_that_has_gone_costs_the_tables_and_not_the_json(
    server: CompletionServer, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "weir.cli", "bench", "--base-url", server.url, *SMALL, "--json", str(path)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=writer)
    finally:
        os.close(writer)
    async with asyncio.timeout(60):
        assert await process.wait() == EXIT_BROKEN_PIPE
    assert json.loads(path.read_text())["num_requests"] == 6


async def test_each_run_has_prompts_of_its_own(server: CompletionServer) -> None:
    for _ in range(2):
        assert await bench(server, *SMALL, "--quiet") == 0
    prompts = [tuple(call.body["prompt"]) for call in server.calls]
    assert len(set(prompts)) == len(prompts) == 14


@pytest.mark.parametrize("options", [(), ("--quiet",)])
async def test_failed_requests_are_shown_and_told_by_the_exit_code(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(call: Call) -> None:
        if len(server.calls) == 4:
            call.send_json({"error": {"message": "busy"}}, status=429)
        else:
            await answer_in_full(call)

    async with CompletionServer(answer) as server:
        assert await bench(server, *SMALL, *options) == 1
    out, err = capsys.readouterr()
    if options:
        assert (out, err) == ("", "weir bench: failed    1 x http_429: busy\n")
    else:
        assert "requests  5 done, 1 failed in " in out
        assert "failed    1 x http_429: busy\n" in out


async def test_a_sweep_and_a_burst_have_tables_of_their_own(
    server: CompletionServer, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--input-tokens", "8", "--output-tokens", "3")
    assert await bench(server, "--workload", "w6", *shape, "--num-requests", "3", "--request-rate", "200,inf") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (heading,) = [index for index, row in enumerate(rows) if row[:2] == ["rate", "/s"]]
    assert [row[0] for row in rows[heading + 1 : heading + 3]] == ["200", "inf"]
    assert await bench(server, "--workload", "w5", *shape, "--burst-input-tokens", "20", "--burst-requests", "1") == 0
    out = capsys.readouterr().out
    assert "1 prompts of 20 tokens landing" in out
    assert "\nalone " in out
    assert "\nduring the burst " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "nothing"], "base_url: 'nothing' is not http://host:port"),
        (["--input-tokens", "0"], "input_tokens: '0' is not a number of tokens"),
        (["--output-tokens", "5:1"], "output_tokens: '5:1' is not a number of tokens"),
        (["--num-requests", "0"], "num_requests: '0' is below the minimum of 1"),
        (["--request-rate", "0"], "request_rate: '0' is neither inf nor a number above 0, at most 100,000"),
        (["--request-rate", "1,x"], "request_rate: 'x' is neither inf nor a number above 0"),
        (["--request-rate", "1", "--concurrency", "2"], "request_rate: 1 goes with no concurrency (2)"),
        (["--workload", "w5", "--request-rate", "1"], "request_rate: w5 has its own pace"),
        (["--workload", "w5", "--num-requests", "1"], "num_requests: w5 has one for each stream"),
        (["--burst-requests", "1"], "burst_requests and burst_input_tokens: w1 has no burst; w5 has"),
        (["--workload", "w7"], "workload: 'w7' is not one of w1, w2, w3, w4, w5, w6"),
        (["--goodput", "ttft"], "goodput: 'ttft' is not one of ttft=S"),
        (["--endpoint", "chat", "--prompt-kind", "tokens"], "prompt_kind: tokens is for completions"),
        (["--json", "/absent/result.json"], "json: /absent/result.json cannot be written"),
        (["--tokenizer", "/absent"], "tokenizer: /absent is neither a tokenizer.json nor a directory with one"),
        (["--text-file", "/absent"], "text_file: /absent cannot be read"),
        (["--timeout-s", "0"], "timeout_s: '0' is below the minimum of 0.001"),
        (["--temperature", "-1"], "temperature: '-1' is below the minimum of 0"),
        (["--base-url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: "),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"weir bench: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_name_is_its_workload_and_a_change_makes_it_custom() -> None:
    assert config_of("--workload", "w4").shape() == PRESETS["w4"]
    assert config_of("--workload", "w4", "--concurrency", "8").shape().name == "w4"
    changed = config_of("--workload", "w4", "--concurrency", "4", "--shared-prefix-tokens", "0").shape()
    assert (changed.name, changed.concurrency, changed.shared_prefix_tokens, changed.num_requests) == (
        "custom",
        4,
        0,
        32,
    )


def test_one_pace_takes_the_place_of_the_other() -> None:
    driven = config_of("--workload", "w2", "--request-rate", "2").shape()
    assert (driven.concurrency, driven.request_rates) == (None, (2.0,))
    looped = config_of("--workload", "w6", "--concurrency", "2").shape()
    assert (looped.concurrency, looped.request_rates) == (2, ())
    steady = config_of("--workload", "w5", "--concurrency", "2").shape()
    assert (steady.concurrency, steady.num_requests) == (2, 2)


def test_the_model_of_weir_up_is_not_that_of_the_server() -> None:
    environ = {"WEIR_MODEL": "hf:org/name", "WEIR_MODEL_NAME": "name", "WEIR_API_KEY": "k"}
    config = config_of(environ=environ)
    assert (config.model, config.api_key) == ("name", "k")
    assert config_of("--model", "other", environ=environ).model == "other"


async def interrupt(server: CompletionServer, *options: str, num_calls: int) -> tuple[bytes, bytes]:
    """What a small measurement prints, and complains of, that Ctrl-C ends once the server has had so many calls."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.cli", "bench", "--base-url", server.url, *SMALL, *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: len(server.calls) == num_calls, timeout_s=30)
        process.send_signal(signal.SIGINT)
        printed = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 130
    return printed


async def test_ctrl_c_in_the_warm_up_is_one_line() -> None:
    async with CompletionServer(lambda _: asyncio.Event().wait()) as server:
        _, err = await interrupt(server, num_calls=1)
    assert err == b"weir bench: interrupted before the measurement began\n"


async def test_ctrl_c_ends_it_with_the_results_so_far(tmp_path: Path) -> None:
    async def answer(call: Call) -> None:
        if len(server.calls) > 4:
            await asyncio.Event().wait()
        await answer_in_full(call)

    path = tmp_path / "result.json"
    async with CompletionServer(answer) as server:
        out, _ = await interrupt(server, "--json", str(path), num_calls=6)
    assert b"requests  3 done, 0 failed, 2 unfinished in " in out
    assert b"PARTIAL   stopped by interrupt" in out
    document = json.loads(path.read_text())
    assert (document["complete"], document["stopped_by"]) == (False, "interrupt")
    assert (document["num_succeeded"], document["num_unfinished"]) == (3, 2)


def test_a_terminal_has_a_bar_with_what_failed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    plan = RequestPlan(kind="main", index=0, due_s=0.0, body=b"", input_tokens=1, output_tokens=1)
    good, bad = Exchange(plan), Exchange(plan)
    bad.failure = Failure(kind="timeout", message="")
    with BenchProgress(console) as progress:
        progress.run_begins("main", 3)
        progress.request_ended(good)
        progress.request_ended(bad)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "main" in shown
    assert "2/3" in shown
    assert "1 failed" in shown
