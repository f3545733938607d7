"""The workers that a route can be chosen from, indexed once for each change of the cluster.

A snapshot: it knows what workers registered, not what this gateway has sent them since (`InFlightLedger`), and asks
nobody. Building it is linear in the number of workers; looking into it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weir.core.kv_layout import LayoutFingerprint
from weir.core.worker import Role, WorkerId, WorkerInfo, WorkerState, speaks_our_protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFleet:
    """The workers that may be given work for one model, each group in the order of their ids.

    Attributes:
        prefill: prefill workers by the fingerprint of the KV they make.
        decode: decode workers.
        paired_decode: those of them whose KV some prefill worker makes.
        by_id: all of them.
        max_model_len: the longest sequence that every one of them takes, in tokens; None without a worker.
        block_sizes: the distinct block sizes among them, in order: prefix hashes are made for each.
    """

    prefill: Mapping[LayoutFingerprint, tuple[WorkerInfo, ...]]
    decode: tuple[WorkerInfo, ...]
    paired_decode: tuple[WorkerInfo, ...]
    by_id: Mapping[WorkerId, WorkerInfo]
    block_sizes: tuple[int, ...]
    max_model_len: int | None


class Fleet:
    """Every model's workers at one moment."""

    def __init__(self, workers: Iterable[WorkerInfo]) -> None:
        self._all = tuple(workers)
        by_model: dict[str, list[WorkerInfo]] = {}
        for worker in sorted(self._all, key=lambda worker: worker.worker_id):
            if _may_be_given_work(worker):
                by_model.setdefault(worker.model, []).append(worker)
        self._models = {model: _index(members) for model, members in by_model.items()}

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All of them, also those that may not be given work now."""
        return self._all

    def of_model(self, model: str) -> ModelFleet:
        """The workers of a model; empty for one that nobody serves."""
        return self._models.get(model) or _index([])


def _may_be_given_work(worker: WorkerInfo) -> bool:
    return worker.state is WorkerState.READY and speaks_our_protocol(worker.protocol_min, worker.protocol_max)


def _index(members: list[WorkerInfo]) -> ModelFleet:
    prefill: dict[LayoutFingerprint, list[WorkerInfo]] = {}
    for worker in members:
        if worker.role is Role.PREFILL:
            prefill.setdefault(worker.fingerprint, []).append(worker)
    decode = tuple(worker for worker in members if worker.role is Role.DECODE)
    return ModelFleet(
        prefill=MappingProxyType({fingerprint: tuple(group) for fingerprint, group in prefill.items()}),
        decode=decode,
        paired_decode=tuple(worker for worker in decode if worker.fingerprint in prefill),
        by_id=MappingProxyType({worker.worker_id: worker for worker in members}),
        block_sizes=tuple(sorted({worker.layout.block_size for worker in members})),
        max_model_len=min((worker.max_model_len for worker in members), default=None),
    )
