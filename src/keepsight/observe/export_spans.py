"""Exports each request's account as OpenTelemetry spans to a collector.

Needs the extra `otel`, and is imported only if an endpoint is configured. A request with a `traceparent` header
continues its caller's trace. Spans are sent from a thread of the SDK.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from keepsight.errors import ServerStartError
from keepsight.observe.account import RequestAccount

SERVICE = "keepsight"
# Shutdown waits no longer than this for a collector that does not answer.
MAX_SECONDS_TO_CLOSE = 2.0
# The exporter logs each batch that a collector does not take, several a second on a busy server.
SECONDS_BETWEEN_COMPLAINTS = 60.0
# The most items described in one span: a span holds 128 attributes, and drops its first ones if there are more.
MAX_MEDIA = 30
Value = str | int | Sequence[str]


class SpanExport:
    def __init__(self, exporter: SpanExporter) -> None:
        # The SDK lets what it is given override its environment variables.
        name = OTELResourceDetector().detect().attributes.get("service.name") or SERVICE
        resource = Resource.create({"service.name": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer: Tracer = self._provider.get_tracer(SERVICE)  # type: ignore[assignment]

    @classmethod
    def to_endpoint(cls, url: str) -> "SpanExport":
        """Export by OTLP over HTTP."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger(OTLPSpanExporter.__module__).addFilter(Seldom())
        try:
            return cls(OTLPSpanExporter(url))
        except ValueError as error:
            raise ServerStartError(f"OpenTelemetry refuses the values of its OTEL_ variables: {error}") from error

    def export(self, account: RequestAccount) -> None:
        """Export the account of a request that has ended."""
        # From the monotonic clock to wall-clock time.
        difference = time.time_ns() - time.monotonic_ns()

        def to_ns(moment: float) -> int:
            return difference + int(moment * 1e9)

        caller = {} if account.trace_parent is None else {"traceparent": account.trace_parent}
        context = TraceContextTextMapPropagator().extract(caller)
        whole = self._tracer.start_span(
            "request", context, SpanKind.SERVER, _attributes_of(account), start_time=to_ns(account.began)
        )
        inside = set_span_in_context(whole, context)
        for span in account.spans:
            item = {} if span.item is None else {"keepsight.media_hash": account.media[span.item].media_hash}
            part = self._tracer.start_span(span.stage, inside, attributes=item, start_time=to_ns(span.began))
            part.end(to_ns(span.ended))
        if account.end_reason == "error":
            whole.set_status(StatusCode.ERROR)
        whole.end(to_ns(account.ended))

    def close(self) -> None:
        """Send the pending spans, if a collector takes them."""
        # In a thread, as a shutdown waits for the response to the request in flight.
        closing = threading.Thread(target=self._provider.shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(MAX_SECONDS_TO_CLOSE)
        if closing.is_alive():
            self._exporter.shutdown()


class Seldom(logging.Filter):
    """A filter for a logger: passes one message a minute at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._quiet_until = clock, float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if (now := self._clock()) < self._quiet_until:
            return False
        self._quiet_until = now + SECONDS_BETWEEN_COMPLAINTS
        return True


def _attributes_of(account: RequestAccount) -> Mapping[str, Value]:
    body = account.describe()
    media: dict[str, str | None] = {}
    for index, item in enumerate(body.media[:MAX_MEDIA]):
        told = {"modality": item.modality, "hash": item.media_hash, "answered_by": item.answered_by, "tier": item.tier}
        media |= {f"keepsight.media.{index}.{name}": value for name, value in told.items()}
    return {
        "gen_ai.response.id": body.id,
        "gen_ai.response.finish_reasons": (body.status,),
        "gen_ai.usage.input_tokens": body.prompt_tokens,
        "gen_ai.usage.output_tokens": body.completion_tokens,
        "keepsight.cached_tokens": body.cached_tokens,
        "keepsight.num_media": body.num_media,
        **{name: value for name, value in media.items() if value is not None},
    }
