"""OpenTelemetry: one span for each request, under vLLM's names, sent by the exporter's thread."""

import logging
import os
from math import isnan

from dflash_jax.errors import InputError
from dflash_jax.server.request_context import RequestContext

log = logging.getLogger("dflash_jax.server")

# Seconds of one export, and milliseconds of the last one at the end.
EXPORT_S, FLUSH_MS = 5, 2_000


class Tracer:
    """Sends spans of requests to an OTLP collector.

    Spans wait in a bounded queue, which a thread empties. Spans that do not fit or that the collector refuses are lost.
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc (the default) or http/protobuf; OpenTelemetry's other variables apply,
    too.
    """

    def __init__(self, endpoint: str):
        """Starts the exporter.

        Raises:
            InputError: The packages are missing, or the protocol is unknown.
        """
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
        if protocol not in ("grpc", "http/protobuf"):
            raise InputError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}: it must be grpc or http/protobuf")
        try:
            if protocol == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            else:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as e:
            raise InputError(f'--otlp-traces-endpoint needs {e.name}: pip install "dflash-jax[otlp]"') from None
        self._kind, self._status, self._code = SpanKind.SERVER, Status, StatusCode
        name = os.environ.get("OTEL_SERVICE_NAME", "dflash-jax")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))
        self._tracer = self._provider.get_tracer("dflash_jax")
        self._propagator = TraceContextTextMapPropagator()

    def end(self, context: RequestContext) -> None:
        """Ends the span of a request. An error is logged and does not affect the request."""
        try:
            self._end(context)
        except Exception:
            log.exception("a span was not written")

    def _end(self, context: RequestContext) -> None:
        parent, began = self._propagator.extract(context.headers), int(context.began * 1e9)
        span = self._tracer.start_span("llm_request", parent, kind=self._kind, start_time=began)
        for name, value in attributes(context).items():
            span.set_attribute(name, value)
        if context.status >= 500:
            span.set_status(self._status(self._code.ERROR))
        span.end()

    def flush(self) -> None:
        """Sends waiting spans, for at most two seconds."""
        self._provider.force_flush(FLUSH_MS)


def attributes(context: RequestContext) -> dict[str, str | int | float | list[int]]:
    """Attributes of a span under vLLM's names, and each drafter's drafts and accepted ones by their place in the block.

    Counts are sums over the request's sequences; times are those of its slowest sequence, in seconds.
    """
    requests = [sequence.request for sequence in context.sequences]
    params, before = requests[0].params, [None, *(r.prompt for r in requests)]
    # Choices of one prompt are neighbours, so a prompt counts once where it differs from the one before.
    prompts = sum(len(r.prompt) for r, previous in zip(requests, before, strict=False) if r.prompt != previous)
    values = {
        "gen_ai.response.model": context.model,
        "gen_ai.request.id": context.answer_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": len(requests),
        "gen_ai.usage.num_sequences": len(requests),
        "gen_ai.usage.prompt_tokens": prompts,
        "gen_ai.usage.completion_tokens": sum(len(r.tokens) for r in requests),
    }
    for name, rounds in context.rounds.by_drafter().items():
        drafted, accepted = rounds.by_place()
        values |= {f"dflash.drafted_per_pos.{name}": drafted, f"dflash.accepted_per_pos.{name}": accepted}

    def slowest(name: str, later: str, earlier: str) -> None:
        spans = [getattr(r.times, later) - getattr(r.times, earlier) for r in requests]
        if known := [s for s in spans if not isnan(s)]:
            values[f"gen_ai.latency.{name}"] = max(known)

    slowest("time_in_queue", "admitted", "submitted")
    slowest("time_to_first_token", "first_token", "submitted")
    slowest("e2e", "finished", "submitted")
    slowest("time_in_model_prefill", "first_token", "admitted")
    slowest("time_in_model_decode", "finished", "first_token")
    slowest("time_in_model_inference", "finished", "admitted")
    return values
