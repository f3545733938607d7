"""The servers that `benchmarks.peers` compares: how each is started, at which settings, and what it does not know."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison import Kind
from benchmarks.server_process import weir_up_command

ALL_WORKLOADS = ("w1", "w2", "w3", "w4", "w5")
MAX_STREAMS = 32
MAX_SEQUENCE = 1536
"""Tokens of the longest sequence, W5's long prompts, with room for a start token."""
KV_TOKENS = 16_384
"""Of all running sequences, where a server lets its cache be sized in tokens: twice what any workload runs at once."""
OPENVINO_BLOCK = 32
TRANSFORMERS_BLOCK = 64
OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Where the peers are; None is not installed."""

    llama_server: Path | None
    vllm: Path | None
    transformers: Path | None
    openvino_python: Path | None

    @classmethod
    def find(
        cls,
        *,
        llama_server: Path | None = None,
        vllm: Path | None = None,
        transformers: Path | None = None,
        openvino_python: Path | None = None,
    ) -> Programs:
        """What is given, else what PATH has; for OpenVINO GenAI this Python, if it has the module."""
        has_openvino = importlib.util.find_spec("openvino_genai") is not None
        return cls(
            llama_server=llama_server or _on_path("llama-server"),
            vllm=vllm or _on_path("vllm"),
            transformers=transformers or _on_path("transformers"),
            openvino_python=openvino_python or (Path(sys.executable) if has_openvino else None),
        )

    @property
    def missing(self) -> list[str]:
        names = {
            "llama-server (llama.cpp)": self.llama_server,
            "vllm": self.vllm,
            "transformers serve": self.transformers,
            "OpenVINO GenAI": self.openvino_python,
        }
        return [name for name, path in names.items() if path is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The same weights, as each server takes them.

    Attributes:
        gguf: files; every server that reads them is measured with each.
        float32_dir: see `benchmarks.float32_directory`.
        tokenizer_dir: has the tokenizer.json of all of them.
    """

    gguf: Sequence[Path]
    float32_dir: Path
    tokenizer_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A server at one setting.

    Attributes:
        command: for `server_process`.
        settings: for a reader of the table.
        takes_token_ids: whether a prompt may be a list of token ids; else it is the same prompt's text.
        does_ignore_eos: whether it can be asked to.
    """

    name: str
    kind: Kind
    command: tuple[str, ...]
    settings: str
    ready_path: str = "/health"
    takes_token_ids: bool = True
    does_ignore_eos: bool = True

    @property
    def workloads(self) -> tuple[str, ...]:
        is_variant = self.kind in (Kind.PEER_VARIANT, Kind.AGGREGATED_VARIANT)
        return ("w5",) if is_variant else ALL_WORKLOADS


def contenders(programs: Programs, models: Models) -> list[Contender]:
    """Weir and every peer that is installed, each at the best settings that are known for it on few cores."""
    found = list(_weir())
    if programs.llama_server is not None:
        found += _llama_cpp(programs.llama_server, models)
    if programs.openvino_python is not None:
        found += _openvino(programs.openvino_python, models)
    if programs.vllm is not None:
        found += _vllm(programs.vllm, models)
    if programs.transformers is not None:
        found += _transformers(programs.transformers, models)
    return found


def _weir() -> Iterator[Contender]:
    yield Contender(
        name="Weir",
        kind=Kind.WEIR,
        command=weir_up_command(),
        ready_path="/ready",
        settings="as it comes: one prefill worker, one decode worker, the gateway and the embedded Redis",
    )
    yield Contender(
        name="Weir --aggregated",
        kind=Kind.AGGREGATED,
        command=weir_up_command("--aggregated"),
        ready_path="/ready",
        settings="one worker that does both, in chunks of 256 tokens",
    )
    for chunk in (64, 128):
        yield Contender(
            name=f"Weir --aggregated, chunk {chunk}",
            kind=Kind.AGGREGATED_VARIANT,
            command=("env", f"WEIR_MAX_NUM_BATCHED_TOKENS={chunk}", *weir_up_command("--aggregated")),
            ready_path="/ready",
            settings=f"the same in chunks of {chunk} tokens",
        )


def _llama_cpp(program: Path, models: Models) -> Iterator[Contender]:
    threads = str(_num_cores())
    for gguf in models.gguf:
        name = f"llama.cpp {_quantization(gguf)}"
        command = (
            *(str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", "{port}"),
            *("--threads", threads, "--threads-batch", threads, "--parallel", str(MAX_STREAMS)),
            *("--ctx-size", str(MAX_STREAMS * MAX_SEQUENCE)),
        )
        yield Contender(
            name=name,
            kind=Kind.PEER,
            command=command,
            settings=f"{threads} threads, {MAX_STREAMS} slots of {MAX_SEQUENCE} tokens, continuous batching, "
            "prompt cache, batches of 2048 (micro-batches of 512)",
        )
        yield Contender(
            name=f"{name}, batch 256",
            kind=Kind.PEER_VARIANT,
            command=(*command, "--batch-size", "256", "--ubatch-size", "256"),
            settings="the same with batches of 256",
        )


def _openvino(python: Path, models: Models) -> Iterator[Contender]:
    for gguf in models.gguf:
        for chunk, kind in ((256, Kind.PEER), (64, Kind.PEER_VARIANT)):
            yield Contender(
                name=f"OpenVINO {_quantization(gguf)}" + (f", batch {chunk}" if kind is Kind.PEER_VARIANT else ""),
                kind=kind,
                command=(
                    *(str(python), str(OPENVINO_SERVER), "--port", "{port}", "--model", str(gguf)),
                    *("--tokenizer", str(models.tokenizer_dir), "--num-threads", str(_num_cores())),
                    *("--num-kv-blocks", str(KV_TOKENS // OPENVINO_BLOCK), "--max-num-seqs", "256"),
                    *("--max-num-batched-tokens", str(chunk)),
                ),
                settings=f"ContinuousBatchingPipeline behind a small HTTP server in Python, {_num_cores()} threads, "
                f"cache of {KV_TOKENS:,} tokens in 8 bits, prefix cache, split prompts, batches of {chunk}",
            )


def _vllm(program: Path, models: Models) -> Iterator[Contender]:
    command = (
        *("env", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1"),
        *(str(program), "serve", str(models.float32_dir), "--host", "127.0.0.1", "--port", "{port}"),
        *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64"),
    )
    yield Contender(
        name="vLLM float32",
        kind=Kind.PEER,
        command=command,
        settings="compiled, threads bound by itself, 1 GiB of KV cache, prefix cache, chunked prefill as it comes",
    )
    yield Contender(
        name="vLLM float32, batch 256",
        kind=Kind.PEER_VARIANT,
        command=(*command, "--max-num-batched-tokens", "256"),
        settings="the same with at most 256 tokens in a step",
    )


def _transformers(program: Path, models: Models) -> Iterator[Contender]:
    yield Contender(
        name="transformers float32",
        kind=Kind.PEER,
        command=(
            *("env", "HF_HUB_OFFLINE=1", f"OMP_NUM_THREADS={_num_cores()}"),
            *(str(program), "serve", str(models.float32_dir), "--host", "127.0.0.1", "--port", "{port}"),
            *("--device", "cpu", "--continuous-batching", "--cb-block-size", str(TRANSFORMERS_BLOCK)),
            *("--cb-num-blocks", str(KV_TOKENS // TRANSFORMERS_BLOCK)),
        ),
        settings=f"transformers serve with continuous batching, {_num_cores()} threads, "
        f"cache of {KV_TOKENS:,} tokens, prompts as text",
        takes_token_ids=False,
        does_ignore_eos=False,
    )


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _quantization(gguf: Path) -> str:
    """As file names of this kind end: MODEL.Q8_0.gguf."""
    return gguf.stem.rpartition(".")[2]
