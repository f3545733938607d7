"""One request is one trace over all processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from protos import inference_pb2, inference_pb2_grpc
from tests.integration.engines import prompt_of
from tests.integration.http_streams import complete
from tests.integration.served_cluster import ServedCluster


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that processes export."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            self.spans.extend((service, span) for scope in resource.scope_spans for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and the endpoint to export to."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def generate(cluster: ServedCluster, token_ids: tuple[int, ...]) -> None:
    """The same over gRPC."""
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        prompt = inference_pb2.TokenIds(ids=token_ids)
        sampling = inference_pb2.SamplingParams(max_tokens=4)
        list(stub.Generate(inference_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)))


def test_request_admission_prefill_handoff_and_decode_are_one_trace(tiny_model_dir: Path, tmp_path: Path) -> None:
    with collecting() as (collector, endpoint):
        traced: dict[str, object] = {"otlp-endpoint": endpoint}
        small: dict[str, object] = {"num-blocks": 256, "max-model-len": 1024}
        with ServedCluster(tiny_model_dir, tmp_path, options=traced | small, gateway=traced) as cluster:
            complete(cluster.url, prompt=prompt_of(100), max_tokens=4)
            generate(cluster, prompt_of(100, seed=1))
            cluster.wait_at_rest()
            for process in cluster.processes:
                process.signal(signal.SIGTERM)
            for process in cluster.processes:
                assert process.wait(30.0) == 0, process.log
    traces = {span.trace_id for _, span in collector.spans if span.name == "request"}
    assert len(traces) == 2
    for trace_id in traces:
        of_request = {span.name: service for service, span in collector.spans if span.trace_id == trace_id}
        assert of_request.keys() >= {"serve", "admission", "request", "prefill", "handoff", "decode"}
        assert len({of_request["request"], of_request["prefill"], of_request["decode"]}) == 3, "three processes"
        assert of_request["handoff"] == of_request["decode"]
