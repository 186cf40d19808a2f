"""Each request's account as spans of OpenTelemetry, sent to whoever collects them.

Needs the extra `otel`, and is imported only where an endpoint was named.  A request that came with a `traceparent`
header goes on with its caller's trace.  Spans are sent from a thread of the SDK's own.
"""

import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from keepsight.observe.account import RequestAccount

SERVICE = "keepsight"
# Who ends waits no longer for a collector that does not answer.
MAX_SECONDS_TO_CLOSE = 2.0
# Of so many pictures each is told: a span has 128 attributes, and forgets the first for what comes then.
MAX_MEDIA = 40
Value = str | int | Sequence[str]


class SpanExport:
    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer: Tracer = self._provider.get_tracer(SERVICE)  # type: ignore[assignment]

    @classmethod
    def to_endpoint(cls, url: str) -> "SpanExport":
        """By OTLP over HTTP."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(url))

    def export(self, account: RequestAccount) -> None:
        """Of a request that has ended."""
        # From the clock of moments to that of the day.
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
            item = {} if span.item is None else {"keepsight.media_hash": account.media[span.item][0]}
            part = self._tracer.start_span(span.stage, inside, attributes=item, start_time=to_ns(span.began))
            part.end(to_ns(span.ended))
        if account.end_reason == "error":
            whole.set_status(StatusCode.ERROR)
        whole.end(to_ns(account.ended))

    def close(self) -> None:
        """What waits is sent, if anybody takes it."""
        # Beside, as an exporter that is shut down still waits for the answer to what it is sending.
        closing = threading.Thread(target=self._provider.shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(MAX_SECONDS_TO_CLOSE)
        if closing.is_alive():
            self._exporter.shutdown()


def _attributes_of(account: RequestAccount) -> Mapping[str, Value]:
    body = account.describe()
    media = {
        f"keepsight.media.{index}.{name}": value
        for index, item in enumerate(body.media[:MAX_MEDIA])
        for name, value in (("answered_by", item.answered_by), ("tier", item.tier), ("hash", item.media_hash))
        if value is not None
    }
    return {
        "gen_ai.response.id": body.id,
        "gen_ai.response.finish_reasons": (body.status,),
        "gen_ai.usage.input_tokens": body.prompt_tokens,
        "gen_ai.usage.output_tokens": body.completion_tokens,
        "keepsight.cached_tokens": body.cached_tokens,
        "keepsight.num_media": body.num_media,
        **media,
    }
