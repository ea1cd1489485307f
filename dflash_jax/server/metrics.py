"""Prometheus metrics under vLLM's names, for its dashboards and `vllm bench serve`, and under those of SGLang's."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import isnan
from typing import Any

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
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Metrics under vLLM's names that SGLang's dashboards read under its own.
SGLANG_NAMES = {
    "vllm:num_requests_running": "num_running_reqs",
    "vllm:num_requests_waiting": "num_queue_reqs",
    "vllm:kv_cache_usage_perc": "token_usage",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "queue_time_seconds",
}
# Seconds over which `gen_throughput` is a mean, at least.
THROUGHPUT_S = 5.0

# Requests that another engine has lost.
LOSSES = {
    "resumed": "Requests that went on here after the tokens of another engine.",
    "repeated": "Requests that began again here.",
}
# Totals of both tiers of the prefix cache: the family, its name, the tier's attribute, the text.
PREFIX_TIERS = (
    (GaugeMetricFamily, "bytes", "size", "Bytes of known prefixes."),
    (GaugeMetricFamily, "budget_bytes", "budget", "Bytes at most."),
    (CounterMetricFamily, "hits", "hits", "Requests whose prefix was there; host: a part of it at least."),
    (CounterMetricFamily, "misses", "misses", "Requests whose prefix was not, or not all of it, there."),
    (CounterMetricFamily, "evictions", "evictions", "Parts of prefixes that left for lack of room."),
)
# Totals of each drafter: attributes of `Rounds`, and what its `by_place` gives, at each place.
DRAFTS = {
    "drafts": "Rounds with drafts.",
    "draft_tokens": "Drafted tokens.",
    "accepted_tokens": "Drafted tokens that were accepted.",
}
DRAFTS_BY_PLACE = {
    "dflash:spec_decode_num_draft_tokens_per_pos": "Drafted tokens, by place in the draft.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Accepted, by place in the draft.",
}
MetricFamily = CounterMetricFamily | GaugeMetricFamily


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
        text = "New tokens of a prompt's longest choice."
        self._longest = histogram("request_max_num_generation_tokens", text, TOKENS)
        self._media = {
            step: histogram(f"media_{step}_seconds", text, REQUEST_S, "dflash") for step, text in MEDIA_STEPS.items()
        }
        self._last: dict = {}
        self._losses = dict.fromkeys(LOSSES, 0)
        # When the last mean of the throughput ended, the tokens until then, and the mean.
        self._measured, self._measured_tokens, self._throughput = engine.engine.runner.clock, 0, 0.0

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

    def finish(self, sequence: TextSequence, longest: int | None) -> None:
        """Counts a finished request.

        Args:
            sequence: The request's text.
            longest: New tokens of the longest request of its prompt, where it is the last one that ends; else None.
        """
        t, new = sequence.request.times, len(sequence.request.tokens)
        self._prompt.observe(len(sequence.request.prompt))
        self._new.observe(new)
        if longest is not None:
            self._longest.observe(longest)
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
        engine, s = self._engine.engine, self._engine.engine.statistics

        def counters(name: str, text: str, values: Mapping[Any, float], labels: Sequence[str] = ()) -> Metric:
            """Counters by the values of further labels."""
            return self._family(CounterMetricFamily(name, text, labels=(*LABELS, *labels)), values)

        def counter(name: str, text: str, value: float) -> Metric:
            return counters(f"vllm:{name}", text, {(): value})

        def gauge(name: str, text: str, value: float) -> Metric:
            return self._family(GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS), {(): value})

        def histogram(name: str, text: str, buckets: Sequence[float], counts: Sequence[int], total: float) -> Metric:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            upto = zip([*(str(float(bound)) for bound in buckets), "+Inf"], accumulate(counts), strict=True)
            family.add_metric([self._name, "0"], list(upto), total)
            return family

        text = "Between tokens; those of a round share its time."
        yield histogram("inter_token_latency_seconds", text, TOKEN_S, self._gaps, self._gap_s)
        steps = dict(s.step_tokens)
        counts = [0] * (len(STEP_TOKENS) + 1)
        for tokens, count in steps.items():
            counts[bisect_left(STEP_TOKENS, tokens)] += count
        text = "Tokens of a step of the engine: of prompts, padding included, and new ones."
        total = sum(tokens * count for tokens, count in steps.items())
        yield histogram("iteration_tokens_total", text, STEP_TOKENS, counts, total)
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
        draft_places = engine.config.draft_places
        rounds = s.rounds.copy().by_drafter(draft_places)
        for total, text in DRAFTS.items():
            values = {(name,): getattr(each, total) for name, each in rounds.items()}
            yield counters(f"vllm:spec_decode_num_{total}", text, values, ["drafter"])
        by_place = {name: each.by_place(draft_places[name]) for name, each in rounds.items()}
        for place, (name, text) in enumerate(DRAFTS_BY_PLACE.items()):
            values = {(d, i): count for d, counts in by_place.items() for i, count in enumerate(counts[place])}
            yield counters(name, text, values, ["drafter", "position"])
        ended = {(reason,): s.requests[reason] for reason in ("stop", "length", "abort", "error")}
        yield counters("vllm:request_success", "Requests by how they ended.", ended, ["finished_reason"])
        yield counters(
            "dflash:dispatches", "Dispatches, by compiled rows and width.", dict(s.dispatches), ["rows", "width"]
        )
        for loss, text in LOSSES.items():
            yield counters(f"dflash:cluster_{loss}", text, {(): self._losses[loss]})
        yield counter("engine_host_seconds", "Of the engine's steps, without waiting for the device.", s.host_s)

    def _family(self, family: MetricFamily, values: Mapping[Any, float]) -> MetricFamily:
        """Adds values to a family; a value's key is its labels after the model's name and the engine's number."""
        for labels, value in values.items():
            family.add_metric([self._name, "0", *map(str, labels)], value)
        return family

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
        text = "How keys and values are kept."
        info = GaugeMetricFamily("vllm:cache_config_info", text, labels=(*LABELS, *values))
        return self._family(info, {tuple(values.values()): 1})

    def _prefix_tiers(self) -> Iterator[Metric]:
        """Yields the totals of both tiers of the prefix cache."""
        tiers = self._engine.engine.prefix_cache.tiers
        for kind, name, attribute, text in PREFIX_TIERS:
            values = {(tier,): getattr(getattr(tiers, tier), attribute) for tier in ("device", "host")}
            yield self._family(kind(f"dflash:prefix_tier_{name}", text, labels=(*LABELS, "tier")), values)

    def _sglang(self, families: Mapping[str, Metric]) -> Iterator[Metric]:
        """Yields what SGLang's dashboards read, mostly of the metrics under vLLM's names."""
        for name, other in SGLANG_NAMES.items():
            family = families[name]
            renamed = Metric(f"sglang:{other}", family.documentation, family.type)
            for sample in family.samples:
                renamed.add_sample(sample.name.replace(name, renamed.name), sample.labels, sample.value)
            yield renamed
        engine, s = self._engine.engine, self._engine.engine.statistics
        if (seconds := engine.runner.clock - self._measured) >= THROUGHPUT_S:
            self._throughput = (s.new_tokens - self._measured_tokens) / seconds
            self._measured, self._measured_tokens = engine.runner.clock, s.new_tokens
        rounds, full = s.rounds.copy(), engine.pages.pools[0]
        places = engine.pages.size * full.count * len(full.live)
        gauges = {
            "gen_throughput": ("New tokens in a second.", self._throughput),
            "cache_hit_rate": ("Prompt tokens that were known, 1 for all.", s.cached_tokens / max(s.prompt_tokens, 1)),
            "spec_accept_length": ("New tokens of a round.", rounds.acceptance_length),
            "spec_accept_rate": ("Drafts that were accepted, 1 for all.", rounds.acceptance_rate),
            "max_total_num_tokens": ("Tokens for which there are pages.", places),
            "num_used_tokens": ("Tokens of the pages that requests use.", round(engine.usage * places)),
        }
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily(f"sglang:{name}", text, labels=LABELS), {(): value})
        counters = {
            "num_requests": ("Requests that have ended.", sum(s.requests.values())),
            "spec_verify_calls": ("Rounds.", rounds.total()),
        }
        for name, (text, value) in counters.items():
            yield self._family(CounterMetricFamily(f"sglang:{name}", text, labels=LABELS), {(): value})

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        families = {family.name: family for family in self.registry.collect()}
        return generate_latest(_Families([*families.values(), *self._sglang(families)]))


class _Families(list[Metric]):
    """Metrics that are collected already."""

    collect = list.__iter__
