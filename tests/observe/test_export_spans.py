"""Spans of requests, collected with the OpenTelemetry SDK's in-memory exporter."""

import logging
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from keepsight.errors import ServerStartError
from keepsight.observe.account import RequestAccount, ShownItem
from keepsight.requests import MediaReport, RequestBegun
from tests.clock import Clock

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


def test_a_request_s_span_joins_the_caller_s_trace_and_contains_its_stages() -> None:
    from keepsight.observe.export_spans import SpanExport

    collected = memory.InMemorySpanExporter()
    export = SpanExport(collected)
    before, now, after = time.time(), time.monotonic(), time.time()
    account = RequestAccount("r", [ShownItem("hash", 256)], 300, began=now - 1)
    account.name("mine", now - 1, f"00-{TRACE}-{CALLER}-01")
    account.note_begun(
        RequestBegun("r", now - 0.9, now - 0.8, now - 0.5, (MediaReport("disk", now - 0.75, now - 0.7),))
    )
    account.note_end("stop")
    export.export(account)
    export.close()
    *stages, request_span = collected.get_finished_spans()
    assert [each.name for each in (*stages, request_span)] == ["wait", "load", "prefill", "request"]
    assert f"{request_span.context.trace_id:032x}" == TRACE
    assert f"{request_span.parent.span_id:016x}" == CALLER
    assert {each.parent.span_id for each in stages} == {request_span.context.span_id}
    assert request_span.attributes["keepsight.media.0.modality"] == "image"
    assert request_span.attributes["keepsight.media.0.answered_by"] == "encoder"
    assert request_span.attributes["keepsight.media.0.tier"] == "disk"
    assert stages[1].attributes["keepsight.media_hash"] == "hash"
    assert (stages[1].end_time - stages[1].start_time) / 1e6 == pytest.approx(50, abs=0.1)
    # Clocks of two kinds may be steered apart by some milliseconds.
    assert before - 1.01 <= request_span.start_time / 1e9 <= after - 0.99


def test_variables_that_opentelemetry_refuses_end_the_start_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepsight.observe.export_spans import SpanExport

    installed = SimpleNamespace(OTLPSpanExporter=lambda _url: memory.InMemorySpanExporter())
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", installed)
    SpanExport.to_endpoint("http://127.0.0.1:1/v1/traces").close()
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    with pytest.raises(ServerStartError, match=r"^OpenTelemetry refuses the values of its OTEL_ variables: .*queue"):
        SpanExport.to_endpoint("http://127.0.0.1:1/v1/traces")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "keepsight"),
        ({"OTEL_SERVICE_NAME": "east"}, "east"),
        ({"OTEL_SERVICE_NAME": ""}, "keepsight"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=east,service.version=7"}, "east"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name="}, "keepsight"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=east", "OTEL_SERVICE_NAME": "west"}, "west"),
    ],
)
def test_the_service_has_the_name_that_opentelemetry_s_variables_give_it(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keepsight.observe.export_spans import SpanExport

    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    account = RequestAccount("r", [], 300, began=time.monotonic())
    account.note_end("stop")
    collected = memory.InMemorySpanExporter()
    export = SpanExport(collected)
    export.export(account)
    export.close()
    [span] = collected.get_finished_spans()
    assert span.resource.attributes["service.name"] == name
    assert span.resource.attributes["telemetry.sdk.name"] == "opentelemetry"


@pytest.mark.parametrize(("reason", "status"), [("stop", "UNSET"), ("abort", "UNSET"), ("error", "ERROR")])
def test_a_span_has_the_finish_reason_and_an_error_status_only_for_errors(reason: str, status: str) -> None:
    from keepsight.observe.export_spans import SpanExport

    account = RequestAccount("r", [], 300, began=time.monotonic())
    account.note_end(reason)
    collected = memory.InMemorySpanExporter()
    export = SpanExport(collected)
    export.export(account)
    export.close()
    [request_span] = collected.get_finished_spans()
    assert request_span.status.status_code.name == status
    assert request_span.attributes["gen_ai.response.finish_reasons"] == (reason,)


def test_a_span_of_very_many_pictures_drops_only_later_pictures() -> None:
    from keepsight.observe.export_spans import SpanExport

    account = RequestAccount("r", [ShownItem(f"{index}", 1) for index in range(200)], 300)
    account.note_begun(RequestBegun("r", 0.0, 0.0, 0.0, tuple(MediaReport(found_in="disk") for _ in range(200))))
    account.note_end("stop")
    collected = memory.InMemorySpanExporter()
    export = SpanExport(collected)
    export.export(account)
    export.close()
    *_, request_span = collected.get_finished_spans()
    assert request_span.dropped_attributes == 0
    assert (request_span.attributes["gen_ai.response.id"], request_span.attributes["keepsight.num_media"]) == ("r", 200)
    assert request_span.attributes["keepsight.media.0.tier"] == "disk"


def test_a_collector_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from keepsight.observe import export_spans

    gave_up = threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            assert gave_up.wait(30), "the exporter was not shut down"
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            gave_up.set()

    monkeypatch.setattr(export_spans, "MAX_SECONDS_TO_CLOSE", 0.01)
    export = export_spans.SpanExport(Silent())
    account = RequestAccount("r", [], 300, began=time.monotonic())
    account.note_end("stop")
    export.export(account)
    export.close()
    assert gave_up.is_set()


def test_a_collector_whose_answer_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OTLP exporter notices its shutdown only between exports."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from keepsight.observe import export_spans

    may_end, has_ended = threading.Event(), threading.Event()

    class Dripping(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            may_end.wait(10)
            has_ended.set()
            return SpanExportResult.FAILURE

    monkeypatch.setattr(export_spans, "MAX_SECONDS_TO_CLOSE", 0.01)
    export = export_spans.SpanExport(Dripping())
    account = RequestAccount("r", [], 300, began=time.monotonic())
    account.note_end("stop")
    export.export(account)
    export.close()
    assert not has_ended.is_set()
    may_end.set()


def test_a_collector_that_refuses_every_batch_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    from keepsight.observe.export_spans import Seldom

    clock, logger = Clock(), logging.getLogger("exporter")
    logger.addFilter(Seldom(clock))
    for second in range(150):
        clock.now = second
        logger.error("batch %d was refused", second)
    assert caplog.messages == [f"batch {second} was refused" for second in (0, 60, 120)]
