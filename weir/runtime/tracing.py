"""Spans over processes: one OpenTelemetry trace a request, W3C context in HTTP headers and gRPC metadata.

Off unless an OTLP endpoint is configured; then the SDK is loaded, and until then a span costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def setup_tracing(service_name: str, otlp_endpoint: str | None) -> None:
    """Export the spans of this process to `otlp_endpoint` (`http://host:4317`, OTLP over gRPC); None leaves it off.

    What is not exported yet is flushed when the process exits.
    """
    if otlp_endpoint is None:
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def tracer() -> trace.Tracer:
    """Makes Weir's spans: `with tracer().start_as_current_span("prefill"): ...`."""
    return trace.get_tracer("weir")


def inject(metadata: dict[str, str]) -> None:
    """Add the current span's context to headers or metadata that leave this process."""
    _PROPAGATOR.inject(metadata)


def extract(metadata: Mapping[str, str] | Iterable[tuple[str, str | bytes]]) -> Context:
    """The context that came with headers or metadata; the parent of what is started with it."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata
    carrier = {name.lower(): value for name, value in pairs if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier)
