from __future__ import annotations

import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from weir.runtime.tracing import extract, inject, setup_tracing, tracer

ROOT = Path(__file__).resolve().parents[2]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def test_off_makes_no_spans_and_sends_no_context() -> None:
    setup_tracing("test", None)
    with tracer().start_as_current_span("request") as span:
        metadata: dict[str, str] = {}
        inject(metadata)
    assert not span.is_recording()
    assert metadata == {}


def test_context_passes_through_a_process_that_makes_no_spans() -> None:
    with tracer().start_as_current_span("request", context=extract({"Traceparent": TRACEPARENT})):
        metadata: dict[str, str] = {}
        inject(metadata)
    assert metadata["traceparent"].split("-")[1] == TRACE_ID


def test_foreign_metadata_is_no_context() -> None:
    context = extract([("traceparent", "nonsense"), ("blob-bin", b"\x00")])
    assert not trace.get_current_span(context).get_span_context().is_valid


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_are_exported_at_exit_under_the_callers_trace() -> None:
    collector = _Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    script = (
        "import sys; from weir.runtime.tracing import extract, setup_tracing, tracer;"
        "setup_tracing('prefill', sys.argv[1]);"
        f"tracer().start_span('handoff', context=extract({{'traceparent': '{TRACEPARENT}'}})).end()"
    )
    try:
        subprocess.run([sys.executable, "-c", script, f"http://127.0.0.1:{port}"], cwd=ROOT, check=True, timeout=30)
    finally:
        server.stop(None).wait()
    (resource,) = collector.requests[0].resource_spans
    (span,) = resource.scope_spans[0].spans
    names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert (span.name, span.trace_id.hex(), names["service.name"]) == ("handoff", TRACE_ID, "prefill")
