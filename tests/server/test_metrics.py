"""What the metrics count."""

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server.metrics import LABELS, SGLANG_NAMES, TOKEN_S, Metrics
from tools.mock_runner import FakeClock, MockRunner

NAME = "vllm:inter_token_latency_seconds"


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(NAME + "_")]
    return {name: float(value) for name, value in lines if "_created" not in name}


def test_the_time_of_an_event_is_that_of_its_tokens_in_equal_parts():
    runner, rng = MockRunner(1, 64, clock=FakeClock()), random.Random(0)
    metrics = Metrics("mock", AsyncEngine(Engine(runner, EngineConfig())))
    registry = CollectorRegistry()
    expected = Histogram(NAME, "", LABELS, registry=registry, buckets=TOKEN_S).labels("mock", "0")
    requests, last = [Request([1], SamplingParams(max_tokens=1)) for _ in range(3)], {}
    for _ in range(200):
        # Bounds of buckets, and times between them, of one token and of several.
        runner.time.wait_until(runner.clock + rng.choice([0.0, 0.5, rng.expovariate(1.0)]))
        request, count = rng.choice(requests), rng.choice([0, 1, 2, 5])
        metrics.observe(Event(request, [1] * count, [count] * (count > 0)))
        if count and request in last:
            for _ in range(count):
                expected.observe((runner.clock - last[request]) / count)
        if count:
            last[request] = runner.clock
    found, wanted = samples(generate_latest(metrics.registry).decode()), samples(generate_latest(registry).decode())
    assert found.keys() == wanted.keys()
    assert {name: round(value, 6) for name, value in found.items()} == {n: round(v, 6) for n, v in wanted.items()}
    assert found[f'{NAME}_count{{engine="0",model_name="mock"}}'] > 200


def all_samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


def test_dashboards_of_sglang_read_the_same_values():
    """Also the time of the throughput, which is a mean between two readings that are at least some seconds apart."""
    runner = MockRunner(4, 64, clock=FakeClock())
    service = AsyncEngine(Engine(runner, EngineConfig()))
    metrics, engine = Metrics("mock", service), service.engine
    begin = runner.clock
    for _ in range(3):
        engine.submit(Request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)))
    while engine.running or engine.waiting:
        engine.step()
    engine.step()
    runner.time.wait_until(begin + 100)
    values = all_samples(metrics)
    for name, other in SGLANG_NAMES.items():
        for suffix in ("", "_total", "_sum", "_count"):
            assert values.get(f"sglang:{other}{suffix}") == values.get(name + suffix)
    assert values["sglang:generation_tokens_total"] == 15
    assert values["sglang:gen_throughput"] == 15 / 100
    assert values["sglang:num_requests_total"] == 3
    assert values["sglang:spec_accept_length"] >= 1
    assert values["vllm:iteration_tokens_total_sum"] == engine.statistics.prefilled_tokens + 15
    assert values["vllm:iteration_tokens_total_count"] == sum(engine.statistics.step_tokens.values()) > 1
    runner.time.wait_until(begin + 103)
    assert all_samples(metrics)["sglang:gen_throughput"] == 15 / 100
    runner.time.wait_until(begin + 106)
    assert all_samples(metrics)["sglang:gen_throughput"] == 0


def test_the_longest_choice_of_a_prompt_is_counted_once():
    metrics = Metrics("mock", AsyncEngine(Engine(MockRunner(1, 64, clock=FakeClock()), EngineConfig())))
    sequence = TextSequence([1], SamplingParams(max_tokens=1), (), None)
    for longest in (None, None, 7):
        metrics.finish(sequence, longest)
    values = all_samples(metrics)
    assert values["vllm:request_max_num_generation_tokens_count"] == 1
    assert values["vllm:request_max_num_generation_tokens_sum"] == 7
    assert values["vllm:request_generation_tokens_count"] == 3
