"""What the metrics count."""

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server.metrics import LABELS, TOKEN_S, Metrics
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
