"""The default model on this machine: start time, memory of each process, TTFT and tokens/s at 1, 8 and 32 streams,
beside transformers' `generate`, in one interleaved run.

    python -m benchmarks.default_model [--repeats 3] [--output docs/measured.md]

Starts `weir up` as a process of its own and loads transformers in another, so that neither shares memory with the
load generator. Loopback only; every loop is bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from benchmarks.comparison import Spread
from benchmarks.machine import describe_machine
from benchmarks.server_process import ServerProcess, process_memory_mib, weir_up

STREAMS = (1, 8, 32)
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
MODEL = "SmolLM2-135M-Instruct"
SERVICES = ("prefill_service", "decode_service", "gateway", "valkey", "weir.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One closed burst of streams."""

    ttft_s: list[float]
    num_tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


async def drive(url: str, num_streams: int, salt: str) -> Load:
    """`num_streams` completions at once, streamed; prompts differ, so that no prefix is shared."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_stream(client, _prompt(index, salt))) for index in range(num_streams)]
        elapsed_s = time.monotonic() - started_s
    results = [task.result() for task in tasks]
    return Load(
        ttft_s=[ttft_s for ttft_s, _ in results],
        num_tokens=sum(num_tokens for _, num_tokens in results),
        elapsed_s=elapsed_s,
    )


async def _stream(client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, int]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.monotonic()
    first_s, num_tokens = 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"mid-stream: {event}")
            if event["choices"] and not first_s:
                first_s = time.monotonic()
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return first_s - sent_s, num_tokens


def _prompt(index: int, salt: str) -> list[int]:
    """`PROMPT_TOKENS` ids of ordinary words, different from the first on."""
    seed = sum(map(ord, salt)) * 131 + index * 17
    return [260 + (seed + 7 * position * (index + 3)) % 4000 for position in range(PROMPT_TOKENS)]


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

    def generate(self, prompts: list[list[int]], *, is_batched: bool) -> float:
        """Seconds for `OUTPUT_TOKENS` tokens of each prompt, one after the other or as one batch."""
        self._calls.send((prompts, is_batched))
        return float(self._calls.recv())

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
    calls.send("ready")
    while (call := calls.recv()) is not None:
        prompts, is_batched = call
        batches = [prompts] if is_batched else [[prompt] for prompt in prompts]
        started_s = time.monotonic()
        with torch.inference_mode():
            for batch in batches:
                ids = torch.tensor(batch)
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=OUTPUT_TOKENS,
                    min_new_tokens=OUTPUT_TOKENS,
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
        loads: dict[int, list[Load]] = {count: [] for count in STREAMS}
        alone: dict[int, list[float]] = {count: [] for count in STREAMS}
        batched: dict[int, list[float]] = {count: [] for count in STREAMS}
        for repeat in range(repeats):
            for count in STREAMS:
                salt = f"{repeat}/{count}"
                loads[count].append(asyncio.run(drive(weir.url, count, salt)))
                prompts = [_prompt(index, salt) for index in range(count)]
                num_tokens = count * OUTPUT_TOKENS
                # One after the other costs the same for each prompt: four stand for all.
                sample = prompts[:4]
                alone[count].append(len(sample) * OUTPUT_TOKENS / peer.generate(sample, is_batched=False))
                batched[count].append(num_tokens / peer.generate(prompts, is_batched=True))
                print(f"repeat {repeat + 1}, {count} streams: {loads[count][-1].tokens_per_s:.1f} tok/s", flush=True)
        return _page(weir, _memory_by_service(weir), peer, loads, alone, batched)


def _memory_by_service(weir: ServerProcess) -> dict[str, float]:
    found: dict[str, float] = {}
    for pid, size_mib in weir.memory_mib().items():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        name = next((service for service in SERVICES if service in command), command.split()[0])
        found[name] = found.get(name, 0.0) + size_mib
    return found


def _page(
    weir: ServerProcess,
    memory: dict[str, float],
    peer: TransformersPeer,
    loads: dict[int, list[Load]],
    alone: dict[int, list[float]],
    batched: dict[int, list[float]],
) -> str:
    lines = [
        "# The default model on a small CPU machine",
        "",
        f"`python -m benchmarks.default_model` on {date.today().isoformat()}: {describe_machine()}. "
        "SmolLM2-135M-Instruct (a Q4_1 file: Weir computes with its four and eight bits, transformers in fp32), "
        f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, one prefill and one decode worker, over HTTP. "
        f"Medians of {len(loads[1])} interleaved repetitions, lowest and highest in brackets; the "
        "machine is shared, so ratios say more than figures.",
        "",
        "| streams | Weir tok/s | Weir TTFT p50 / max, s | transformers one by one, tok/s | transformers in one batch, "
        "tok/s | Weir / one by one | Weir / one batch |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for count in STREAMS:
        rates = [load.tokens_per_s for load in loads[count]]
        ttft_s = [ttft for load in loads[count] for ttft in load.ttft_s]
        ratio_alone = statistics.median(rates) / statistics.median(alone[count])
        ratio_batched = statistics.median(rates) / statistics.median(batched[count])
        lines.append(
            f"| {count} | {Spread.over(rates).show(1)} | {statistics.median(ttft_s):.2f} / {max(ttft_s):.2f} | "
            f"{Spread.over(alone[count]).show(1)} | {Spread.over(batched[count]).show(1)} | "
            f"{ratio_alone:.2f} | {ratio_batched:.2f} |"
        )
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
