"""Holds one model and its KV cache and runs batches through them. Knows no sequence beyond the batch at hand."""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Callable, Sequence

import torch

from kernels.cpu.library import LibraryError, load
from kernels.cpu.plan import Plan, PlannedBatch
from kernels.cpu.structs import Format
from weir.core.errors import ConfigError
from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.decode_graphs import CudaRecorder, DecodeGraphs, graph_sizes
from weir.engine.device import Device, MemoryReading, kv_bytes
from weir.engine.host_memory import available_bytes
from weir.engine.kv_dtype import choose_kv_dtype, nvidia_capability
from weir.engine.models.decoder import Decoder
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.open_weights import open_weights
from weir.engine.packed_weights import PackedWeights
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.quantized_weights import QuantizedWeights
from weir.engine.staging import Staging
from weir.engine.weights import Weights

logger = logging.getLogger(__name__)

DEFAULT_KV_CACHE_BYTES = 320 << 20
"""KV memory on a CPU where none is set: this much, or one longest sequence if that is more, but never over half of what
is free. It is taken from the system only as blocks are used."""

_LARGEST_MAPPING_BYTES = (32 << 20) - (1 << 16)
"""Just under what glibc lets its threshold grow to."""


class ModelRunner:
    """One loaded model.

    Args:
        config: the engine's settings.
        free_memory: bytes this process may still take; bounds the KV pool on a CPU.

    Attributes:
        card: the model as served.
        weights_hash: names its weights as this runner computes with them.
        layout: of its KV blocks.
        num_blocks: blocks in the cache.
        max_model_len: longest sequence, in tokens.
        cache: the KV of all sequences.
        plan: the model as the CPU kernels run it; None where torch does.
        runs_ahead: a call of `execute` returns before the device has computed.

    Raises:
        ModelLoadError: the checkpoint is broken; names the file or the tensor.
        ConfigError: a setting that this model or machine cannot meet.
    """

    def __init__(self, config: EngineConfig, free_memory: Callable[[], int] = available_bytes) -> None:
        started_s = time.monotonic()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.card = ModelCard.load(config.model_dir)
        decoder_config = DecoderConfig.load(config.model_dir)
        self.max_model_len = _max_model_len(config, self.card)
        self._chosen_device = Device.choose(config)
        self._device = self._chosen_device.torch_device
        self._memory_before: MemoryReading | None = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread; kernels are launched there
            self._memory_before = MemoryReading.of(self._device)
        dtype_name = _dtype_name(config, self._device)
        library = _cpu_library(config, decoder_config) if self._device.type == "cpu" else None
        source = open_weights(config.model_dir)
        packed: PackedWeights | QuantizedWeights | None = None
        if library is not None:
            float_format = Format[dtype_name.upper()]
            packed = PackedWeights(library, source, config.model_dir, config.quantization, float_format)
        elif self._device.type == "cuda":
            packed = QuantizedWeights(source, config.quantization, getattr(torch, dtype_name), self._device)
        elif config.quantization in ("int8", "int4"):
            logger.warning("quantization %s needs the CPU kernels: weights are %s", config.quantization, dtype_name)
        is_quantized = packed is not None and packed.is_quantized
        self.weights_hash = self.card.weights_hash
        if is_quantized:
            self.weights_hash += f"/{config.quantization}"
        kv_dtype = choose_kv_dtype(
            config.kv_cache_dtype,
            default="float16" if is_quantized and library is not None else dtype_name,
            capability=nvidia_capability(self._device),
        )
        self.layout = KvLayout(
            num_layers=decoder_config.num_layers,
            num_kv_heads=decoder_config.num_kv_heads,
            head_dim=decoder_config.head_dim,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
        )
        is_batch_invariant = config.batch_invariant and library is None
        if is_batch_invariant:
            _check_invariance(is_quantized=is_quantized, device=self._device)
            packed = None
        weights = Weights(
            source, getattr(torch, dtype_name), self._device, packed, is_batch_invariant=is_batch_invariant
        )
        self.runs_ahead = self._device.type == "cuda"
        self._staging = Staging(self._device)
        try:
            with torch.inference_mode():
                self._model = Decoder(decoder_config, weights, self.max_model_len, self._device)
            self.num_blocks = self._choose_num_blocks(config, free_memory)
            self.cache = PagedKvCache(self.layout, self.num_blocks, self._device)
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"{self.card.name} as {dtype_name}, a step of {config.token_budget()} tokens and "
                f"gpu_memory_utilization {config.gpu_memory_utilization:g} of KV do not fit {self._device}: {exc}",
                param="gpu_memory_utilization",
            ) from exc
        self._graphs = self._record_graphs(config) if self._device.type == "cuda" and config.cuda_graphs else None
        self.plan: Plan | None = None
        if library is not None:
            self.plan = Plan(library, max_tokens=config.token_budget(), max_logits=config.token_budget())
            self._model(PlannedBatch(self.plan), self.cache)
            try:
                self.plan.prepare(self.cache.tensor, config.num_threads or torch.get_num_threads())
            except OSError as exc:
                raise ConfigError(
                    f"max_num_batched_tokens is {config.token_budget()}; a step of so many does not fit this machine's "
                    f"memory: {exc.strerror}",
                    param="max_num_batched_tokens",
                ) from exc
        logger.info(
            "model loaded",
            extra={
                "model": self.card.name,
                "dtype": dtype_name,
                "device": str(self._device),
                "num_blocks": self.num_blocks,
                "seconds": round(time.monotonic() - started_s, 3),
            },
        )

    def execute(self, items: Sequence[ScheduledSequence], chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Compute `items`, writing their KV: float32 logits [num_logits, vocab_size], valid until the next call.

        Args:
            chosen: the tokens that the previous step chose, for items whose token is late.
        """
        arrays = BatchArrays.from_scheduled(items, self.layout.block_size)
        with torch.inference_mode():
            if self.plan is not None:
                return self.plan.run(Batch.on_host(arrays))
            if self._graphs is not None and self._graphs.fits(arrays):
                return self._graphs.run(arrays, chosen)
            if self._device.type == "cpu":
                return self.compute(Batch.on_host(arrays, chosen))
            return self.compute(Batch.on_device(arrays, self._staging, chosen))

    def compute(self, batch: Batch) -> torch.Tensor:
        """Logits of a batch that is on the device, by torch and Triton, op by op."""
        logits = self._model(batch, self.cache)
        assert isinstance(logits, torch.Tensor)
        return logits.float()

    def _record_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        try:
            with torch.inference_mode():
                return DecodeGraphs(
                    self.compute,
                    CudaRecorder(self._device),
                    sizes=graph_sizes(config.max_num_seqs),
                    max_blocks=self.layout.blocks_for(self.max_model_len),
                    device=self._device,
                )
        except RuntimeError as exc:  # out of memory, or an op that can't be recorded
            logger.warning("decode steps run without CUDA graphs, which costs time between kernels: %s", exc)
            return None

    def warm_up(self) -> None:
        """Touch every weight once, so that the first request finds them in memory. Only before any block is in use."""
        if self._device.type == "cpu":
            # glibc returns freed memory above twice its largest freed mapping to the system, and the next layer faults
            # it in again: 23,000 faults and 30 % of a step of 8 sequences. One mapping of 32 MiB ends that.
            torch.empty(_LARGEST_MAPPING_BYTES, dtype=torch.uint8)
        self.execute([self._probe(1)])
        self.cache.tensor[0].zero_()

    def _probe(self, num_tokens: int) -> ScheduledSequence:
        blocks = range(self.layout.blocks_for(num_tokens))
        return ScheduledSequence(
            sequence_id="warm-up", token_ids=(0,) * num_tokens, start=0, block_ids=blocks, num_logits=1
        )

    def _choose_num_blocks(self, config: EngineConfig, free_memory: Callable[[], int]) -> int:
        block_bytes = self.layout.block_bytes
        needed = self.layout.blocks_for(self.max_model_len)
        if config.num_blocks is not None:
            name, num_blocks = "num_blocks", config.num_blocks
        elif config.kv_cache_memory_bytes is not None:
            name, num_blocks = "kv_cache_memory_bytes", config.kv_cache_memory_bytes // block_bytes
        elif self._device.type == "cuda":
            name, num_blocks = "gpu_memory_utilization", self._free_device_bytes(config) // block_bytes
        else:
            wanted = max(DEFAULT_KV_CACHE_BYTES, needed * block_bytes)
            name, num_blocks = "kv_cache_memory_bytes", min(wanted, free_memory() // 2) // block_bytes
        if num_blocks < needed:
            raise ConfigError(
                f"{name} gives a KV pool of {num_blocks} blocks of {config.block_size} tokens; one sequence of "
                f"max_model_len {self.max_model_len} needs {needed} ({needed * block_bytes} bytes)",
                param=name,
            )
        if self._device.type == "cpu" and num_blocks * block_bytes > (free := free_memory()):
            raise ConfigError(
                f"{name} gives a KV pool of {num_blocks} blocks, {num_blocks * block_bytes} bytes; {free} are free",
                param=name,
            )
        return num_blocks

    def _free_device_bytes(self, config: EngineConfig) -> int:
        """What is left for KV on the device beside weights and the largest step, which is computed once to see."""
        assert self._memory_before is not None
        num_tokens = min(config.token_budget(), self.max_model_len)
        arrays = BatchArrays.from_scheduled([self._probe(num_tokens)], self.layout.block_size)
        small = PagedKvCache(self.layout, self.layout.blocks_for(num_tokens), self._device)
        with torch.inference_mode():
            self._model(Batch.on_device(arrays, self._staging), small)
            # As many rows of logits as a step has at most, and what sampling makes of them.
            logits = torch.empty((config.max_num_seqs, self.card.vocab_size), device=self._device)
            del logits, small
        torch.cuda.synchronize(self._device)
        return kv_bytes(self._memory_before, MemoryReading.of(self._device), config.gpu_memory_utilization)


def _cpu_library(config: EngineConfig, decoder_config: DecoderConfig) -> ctypes.CDLL | None:
    if config.kernel_cache_dir is None:
        return None
    if decoder_config.experts is not None:
        logger.warning("the CPU kernels are not used, which is several times slower: they have no experts")
        return None
    try:
        return load(config.kernel_cache_dir.expanduser())
    except (LibraryError, OSError) as exc:
        logger.warning("the CPU kernels are not used, which is several times slower: %s", exc)
        return None


def _check_invariance(*, is_quantized: bool, device: torch.device) -> None:
    if is_quantized:
        raise ConfigError(
            "batch_invariant is true; products with quantised weights on a GPU are not: quantization must be none",
            param="batch_invariant",
        )
    if device.type == "cpu":
        raise ConfigError(
            "batch_invariant is true; plain torch on a CPU is not: it needs the CPU kernels", param="batch_invariant"
        )


def _max_model_len(config: EngineConfig, card: ModelCard) -> int:
    if config.max_model_len is None:
        return card.max_model_len
    if config.max_model_len > card.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; {card.name} has positions for {card.max_model_len} tokens",
            param="max_model_len",
        )
    return config.max_model_len


def _dtype_name(config: EngineConfig, device: torch.device) -> str:
    if config.dtype != "auto":
        return config.dtype
    if device.type == "cpu":
        return "float32"
    fields = json.loads((config.model_dir / "config.json").read_text())
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    return name if name in ("float16", "bfloat16", "float32") else "bfloat16"
