"""Prometheus metrics under vLLM's names, so that its dashboards and `vllm bench serve` can read them."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import isnan

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dflash_jax.engine.request import Event
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.protocol import MEDIA_STEPS, Choice

LABELS = ("model_name", "engine")
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

# Requests that another engine has lost.
LOSSES = {
    "resumed": "Requests that went on here after the tokens of another engine.",
    "repeated": "Requests that began again here.",
}


class Metrics:
    """Histograms of requests, and the engine's totals when they are read.

    Attributes:
        registry: The registry of Prometheus.
    """

    def __init__(self, name: str, engine: AsyncEngine):
        self._name, self._engine, self.registry = name, engine, CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets, prefix: str = "vllm") -> Histogram:
            metric = Histogram(f"{prefix}:{name}", text, LABELS, registry=self.registry, buckets=buckets)
            return metric.labels(self._name, "0")

        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        # Seconds between tokens: their sum, and how many are in each bucket. `Histogram` would count them one by one.
        self._gap_s, self._gaps = 0.0, [0] * (len(TOKEN_S) + 1)
        self._per_token = histogram("request_time_per_output_token_seconds", "A request's mean.", TOKEN_S)
        self._latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_S)
        self._queued = histogram("request_queue_time_seconds", "Arrival to a slot.", REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", "A slot to the first token.", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "First token to last.", REQUEST_S)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._new = histogram("request_generation_tokens", "New tokens.", TOKENS)
        self._media = {
            step: histogram(f"media_{step}_seconds", text, REQUEST_S, "dflash") for step, text in MEDIA_STEPS.items()
        }
        self._last: dict = {}
        self._losses = dict.fromkeys(LOSSES, 0)

    def count_losses(self, choices: Iterable[Choice]) -> None:
        """Counts those of new requests that another engine has lost."""
        for choice in choices:
            if choice.losses:
                self._losses["resumed" if choice.tokens else "repeated"] += 1

    def observe(self, event: Event) -> None:
        """Counts an event that was just received."""
        request, now = event.request, self._engine.engine.runner.clock
        before, count = self._last.get(request), len(event.tokens)
        if count and before is not None:
            self._gap_s += now - before
            self._gaps[bisect_left(TOKEN_S, (now - before) / count)] += count
        if count:
            self._last[request] = now
        if event.finish_reason is not None:
            self._last.pop(request, None)

    def finish(self, sequence: TextSequence) -> None:
        """Counts a finished request."""
        t, new = sequence.request.times, len(sequence.request.tokens)
        self._prompt.observe(len(sequence.request.prompt))
        self._new.observe(new)
        for step, seconds in sequence.preparation.items():
            self._media[step].observe(seconds)
        before = sum(sequence.preparation.values())
        self._latency.observe(before + t.finished - t.submitted)
        if isnan(t.first_token):
            return
        self._first_token.observe(before + t.first_token - t.submitted)
        self._queued.observe(t.admitted - t.submitted)
        self._prefill.observe(t.first_token - t.admitted)
        self._decode.observe(t.finished - t.first_token)
        if new > 1:
            self._per_token.observe((t.finished - t.first_token) / (new - 1))

    def forget(self, sequence: TextSequence) -> None:
        """Drops a request that was aborted."""
        self._last.pop(sequence.request, None)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's totals; the registry calls it."""
        engine, labels = self._engine.engine, [self._name, "0"]
        s = engine.statistics

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(labels, value)
            return family

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(labels, value)
            return family

        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between tokens; those of a round share its time.", labels=LABELS
        )
        upto = zip([*(str(float(bound)) for bound in TOKEN_S), "+Inf"], accumulate(self._gaps), strict=True)
        gaps.add_metric(labels, list(upto), self._gap_s)
        yield gaps
        yield gauge("num_requests_running", "Requests in a slot.", engine.running)
        yield gauge("num_requests_waiting", "Requests in the queue.", engine.waiting)
        yield gauge("num_requests_swapped", "Requests whose keys and values are on the host.", engine.swapped)
        yield counter("num_preemptions", "How often they were moved there, or given up.", s.preemptions)
        yield gauge("kv_cache_usage_perc", "Pages that requests use, 1 for all.", engine.usage)
        yield self._cache_config()
        yield counter("prompt_tokens", "Prompt tokens.", s.prompt_tokens)
        yield counter("generation_tokens", "New tokens.", s.new_tokens)
        yield counter("prefix_cache_queries", "Prompt tokens looked up.", s.prompt_tokens)
        yield counter("prefix_cache_hits", "Prompt tokens that were known.", s.cached_tokens)
        yield from self._prefix_tiers()
        yield counter("spec_decode_num_drafts", "Rounds with drafts.", s.drafts)
        yield counter("spec_decode_num_draft_tokens", "Drafted tokens.", s.draft_tokens)
        yielded = dict(s.yielded)
        total = sum((n - 1) * count for n, count in yielded.items())
        yield counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", total)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted, by place in the draft.",
            labels=(*LABELS, "position"),
        )
        for place in range(engine.config.largest_block - 1):
            count = sum(c for n, c in yielded.items() if n - 1 > place)
            places.add_metric([*labels, str(place)], count)
        yield places
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=(*LABELS, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([*labels, reason], s.requests[reason])
        yield ended
        rounds = CounterMetricFamily(
            "dflash:dispatches", "Dispatches, by compiled rows and width.", labels=(*LABELS, "rows", "width")
        )
        for (rows, spec), count in dict(s.dispatches).items():
            rounds.add_metric([*labels, str(rows), str(spec)], count)
        yield rounds
        for name, text in LOSSES.items():
            family = CounterMetricFamily(f"dflash:cluster_{name}", text, labels=LABELS)
            family.add_metric(labels, self._losses[name])
            yield family
        yield counter("engine_host_seconds", "Of the engine's steps, without waiting for the device.", s.host_s)

    def _cache_config(self) -> Metric:
        """The pages of keys and values: vLLM's blocks."""
        pages, config = self._engine.engine.pages, self._engine.engine.config
        full, windowed = (pool.count * len(pool.live) for pool in pages.pools)
        values = {
            "block_size": pages.size,
            "num_gpu_blocks": full,
            "num_windowed_gpu_blocks": windowed,
            "enable_prefix_caching": config.prefix_bytes > 0,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How keys and values are kept.", labels=("model_name", "engine", *values)
        )
        info.add_metric([self._name, "0", *map(str, values.values())], 1)
        return info

    def _prefix_tiers(self) -> Iterator[Metric]:
        """Yields the totals of both tiers of the prefix cache."""
        tiers = self._engine.engine.prefix_cache.tiers
        labels = (*LABELS, "tier")
        bytes_ = GaugeMetricFamily("dflash:prefix_tier_bytes", "Bytes of known prefixes.", labels=labels)
        budget = GaugeMetricFamily("dflash:prefix_tier_budget_bytes", "Bytes at most.", labels=labels)
        hits = CounterMetricFamily(
            "dflash:prefix_tier_hits", "Requests whose prefix was there; host: a part of it at least.", labels=labels
        )
        misses = CounterMetricFamily(
            "dflash:prefix_tier_misses", "Requests whose prefix was not, or not all of it, there.", labels=labels
        )
        evictions = CounterMetricFamily(
            "dflash:prefix_tier_evictions", "Parts of prefixes that left for lack of room.", labels=labels
        )
        for name, tier in (("device", tiers.device), ("host", tiers.host)):
            values = (tier.size, tier.budget, tier.hits, tier.misses, tier.evictions)
            families = (bytes_, budget, hits, misses, evictions)
            for family, value in zip(families, values, strict=True):
                family.add_metric([self._name, "0", name], value)
        yield from (bytes_, budget, hits, misses, evictions)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
