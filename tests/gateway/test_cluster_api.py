"""The routes that show the cluster, against what the cluster floor would answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway import cluster_api
from gateway.abort import abort_request
from gateway.admission import AdmissionController
from gateway.error_responses import install_error_handlers
from gateway.services import GatewayServices
from tests.fakes.decode_client import FakeDecodeClient
from tests.fakes.prefill_client import FakePrefillClient
from tests.fakes.worker_clients import MODEL, FakeWorkerClients, worker_info
from weir.cluster.block_ownership import BlockGroup, Holding, HoldingKind
from weir.cluster.request_journal import RequestFailure, RequestRecord, RequestState
from weir.core.deadline import Deadline
from weir.core.errors import InvalidRequestError, UnavailableError, WorkerLostError
from weir.core.request import FinishReason, HandoffId, HandoffKey, RequestId
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo

HOLDING = Holding(
    request_id=RequestId("r1"),
    key=HandoffKey(HandoffId("h1"), 2),
    kind=HoldingKind.SOURCE,
    worker_id=WorkerId("p0"),
    incarnation=Incarnation("p0-1"),
    groups=(BlockGroup(first_block=0, num_blocks=3),),
    until=Deadline.never(),
)


@dataclass
class FakeCluster:
    """Journal, ownership and directory in one."""

    records: dict[str, RequestRecord] = field(default_factory=dict)
    is_up: bool = True
    found: tuple[WorkerInfo, ...] = ()

    async def get(self, request_id: RequestId) -> RequestRecord | None:
        if not self.is_up:
            raise UnavailableError("redis is away", retry_after_s=1.0)
        return self.records.get(request_id)

    async def by_request(self, request_id: RequestId) -> tuple[Holding, ...]:
        return (HOLDING,) if request_id == HOLDING.request_id else ()

    async def by_worker(self, worker_id: WorkerId) -> tuple[Holding, ...]:
        return (HOLDING,) if worker_id == HOLDING.worker_id else ()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.found


@dataclass
class FakePipeline:
    clients: FakeWorkerClients
    names_here: tuple[str, ...] = ()

    def abort(self, name: str) -> int:
        return self.names_here.count(name)


class House:
    def __init__(self) -> None:
        self.prefill = FakePrefillClient(worker_info("p0", Role.PREFILL))
        self.decode = FakeDecodeClient(worker_info("d0", Role.DECODE))
        self.cluster = FakeCluster(found=(self.decode.info, self.prefill.info))
        self.pipeline: Any = FakePipeline(FakeWorkerClients(prefill=[self.prefill], decode=[self.decode]))
        self.admission = AdmissionController(max_running=2, max_waiting=2, max_wait_s=1.0)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        absent: Any = None
        cluster: Any = self.cluster
        app = FastAPI()
        app.state.services = GatewayServices(
            config=absent,
            http=absent,
            models=absent,
            pipeline=self.pipeline,
            admission=self.admission,
            metrics=absent,
            directory=cluster,
            journal=cluster,
            ownership=cluster,
        )
        app.include_router(cluster_api.router)
        install_error_handlers(app)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield client


@pytest.fixture
def house() -> House:
    return House()


def record(state: RequestState = RequestState.FAILED, **fields: Any) -> RequestRecord:
    return RequestRecord(
        request_id=RequestId("r1"),
        owner="g",
        state=state,
        finish_reasons=(FinishReason.STOP,),
        failure=RequestFailure(hop="decode", code="worker_lost", message="gone"),
        **{"prefill_worker": WorkerId("p0"), "decode_worker": WorkerId("d0")} | fields,
    )


async def test_a_request_is_shown_with_its_state_workers_and_failure(house: House) -> None:
    house.cluster.records["r1"] = record(deadline=Deadline.after(60))
    async with house.client() as client:
        shown = (await client.get("/v1/requests/r1")).json()
    assert (shown["id"], shown["object"], shown["state"]) == ("r1", "weir.request", "failed")
    assert (shown["prefill_worker"], shown["decode_worker"]) == ("p0", "d0")
    assert shown["failure"] == {"hop": "decode", "code": "worker_lost", "message": "gone"}
    assert shown["finish_reasons"] == ["stop"]
    assert 50 < shown["remaining_s"] <= 60


async def test_an_unknown_request_is_a_404_and_a_lost_redis_a_503(house: House) -> None:
    async with house.client() as client:
        assert (await client.get("/v1/requests/nobody")).json()["error"]["code"] == "request_not_found"
        assert (await client.get("/v1/requests/nobody")).status_code == 404
        house.cluster.is_up = False
        lost = await client.get("/v1/requests/r1")
    assert lost.status_code == 503
    assert lost.headers["retry-after"]


@pytest.mark.parametrize("query", [{"request": "r1"}, {"worker": "p0"}])
async def test_blocks_are_found_by_request_and_by_worker(house: House, query: dict[str, str]) -> None:
    async with house.client() as client:
        (shown,) = (await client.get("/v1/kv/blocks", params=query)).json()["data"]
    assert (shown["request_id"], shown["handoff_id"], shown["epoch"], shown["kind"]) == ("r1", "h1", 2, "source")
    assert (shown["worker_id"], shown["incarnation"]) == ("p0", "p0-1")
    assert shown["groups"] == [{"first_block": 0, "num_blocks": 3}]
    assert shown["remaining_s"] is None


@pytest.mark.parametrize("query", [{}, {"request": "r1", "worker": "p0"}])
async def test_blocks_need_one_question(house: House, query: dict[str, str]) -> None:
    async with house.client() as client:
        assert (await client.get("/v1/kv/blocks", params=query)).status_code == 400


async def test_workers_are_shown_with_whether_they_can_be_reached(house: House) -> None:
    house.decode.is_connected = False
    async with house.client() as client:
        shown = (await client.get("/v1/workers")).json()["data"]
    assert [(worker["id"], worker["role"], worker["is_connected"]) for worker in shown] == [
        ("d0", "decode", False),
        ("p0", "prefill", True),
    ]
    assert shown[0]["load"]["total_blocks"] == 100


async def test_load_counts_what_runs(house: House) -> None:
    async with house.client() as client, house.admission.admit(num_prompts=2):
        assert (await client.get("/load")).json() == {"server_load": 2, "num_waiting": 0}


async def test_resetting_the_prefix_cache_asks_every_worker(house: House) -> None:
    async with house.client() as client:
        assert (await client.post("/reset_prefix_cache")).json() == {
            "is_reset": True,
            "workers": {"p0": True, "d0": True},
        }
        house.decode.reset_error = WorkerLostError("gone", hop="decode")
        assert (await client.post("/reset_prefix_cache")).json() == {
            "is_reset": False,
            "workers": {"p0": True, "d0": False},
        }


async def test_an_abort_here_asks_nobody_else(house: House) -> None:
    house.pipeline.names_here = ("r1", "r1")
    house.cluster.is_up = False
    assert await abort_request("r1", house.pipeline, house.cluster) == 2
    assert house.decode.aborted == []


async def test_an_abort_reaches_a_request_of_another_gateway_through_its_workers(house: House) -> None:
    house.cluster.records["r1"] = record(RequestState.DECODING, model=MODEL, decode_worker=None)
    await abort_request("r1", house.pipeline, house.cluster)
    assert house.decode.aborted == house.prefill.aborted == ["r1"], "also where the record does not say that it is"


async def test_an_abort_of_nothing_is_refused_and_ends_nobody(house: House) -> None:
    house.pipeline.names_here = ("",)
    with pytest.raises(InvalidRequestError, match="request_id"):
        await abort_request("", house.pipeline, house.cluster)


async def test_an_abort_of_what_is_over_or_unknown_ends_nothing(house: House) -> None:
    house.cluster.records["r1"] = record(RequestState.DONE)
    assert await abort_request("r1", house.pipeline, house.cluster) == 0
    assert await abort_request("nobody", house.pipeline, house.cluster) == 0
    assert house.decode.aborted == []
