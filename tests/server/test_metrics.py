"""What the metrics count."""

import itertools
import random
from collections import Counter

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.cluster.fleet import merged
from dflash_jax.engine.config import EngineConfig, Speculation, speculations_of
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


def two_drafters(tokens: int) -> Metrics:
    """Metrics of an engine that has drafted with both of its drafters; a round yields at most ``tokens``."""
    config = EngineConfig(speculations=speculations_of((8,), (4,)), drafters=("z-lab/a", 'b"\\}'))
    engine, turns = Engine(MockRunner(4, 64, clock=FakeClock(), tokens=tokens), config), itertools.count()
    drafting = [Speculation(8, 0), Speculation(4, 1)]
    engine.policy.choose = lambda *_: drafting[next(turns) % 2]
    for i in range(8):
        engine.submit(Request([1, 2, 3], SamplingParams(max_tokens=40 + i, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return Metrics("mock", AsyncEngine(engine))


def drafts(text: bytes) -> dict[str, Counter]:
    """Values of the counters of drafts by (drafter, position), summed over engines."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        if "spec_decode" in family.name:
            values = found.setdefault(family.name, Counter())
            for sample in family.samples:
                values[sample.labels["drafter"], sample.labels.get("position")] += sample.value
    return found


def test_drafts_are_counted_by_drafter_and_position():
    metrics = two_drafters(tokens=3)
    found, rounds = drafts(metrics.text()), metrics._engine.engine.statistics.rounds
    names = metrics._engine.engine.config.draft_places
    assert rounds.by_drafter().keys() == names.keys()
    for total, by_place, side in (
        ("draft", "dflash:spec_decode_num_draft_tokens_per_pos", 0),
        ("accepted", "vllm:spec_decode_num_accepted_tokens_per_pos", 1),
    ):
        for name, places in names.items():
            counts = [found[by_place][name, str(i)] for i in range(places)]
            assert counts == rounds.by_drafter()[name].by_place()[side]
            assert sum(counts) == found[f"vllm:spec_decode_num_{total}_tokens"][name, None] > 0
        # Positions are those that are compiled: no others have a series.
        assert len(found[by_place]) == sum(names.values())
    # Each round has one token that was not drafted.
    accepted = found["vllm:spec_decode_num_accepted_tokens"].total()
    assert accepted == metrics._engine.engine.statistics.new_tokens - rounds.total()
    assert found["vllm:spec_decode_num_drafts"].total() == rounds.drafts


def test_a_clusters_counts_of_drafts_are_the_sums_of_its_engines():
    texts = {name: two_drafters(tokens).text() for name, tokens in (("a", 2), ("b", 4))}
    sums = {name: drafts(texts["a"])[name] + drafts(texts["b"])[name] for name in drafts(texts["a"])}
    assert drafts(merged(texts)) == sums


def test_each_drafter_has_all_positions_before_it_has_drafted():
    config = EngineConfig(speculations=speculations_of((4,), (3,)), drafters=("a", "b"))
    found = drafts(Metrics("mock", AsyncEngine(Engine(MockRunner(1, 64, clock=FakeClock()), config))).text())
    positions = dict.fromkeys([*(("a", str(i)) for i in range(3)), *(("b", str(i)) for i in range(2))], 0)
    assert {name: dict(values) for name, values in found.items() if "per_pos" in name} == {
        "dflash:spec_decode_num_draft_tokens_per_pos": positions,
        "vllm:spec_decode_num_accepted_tokens_per_pos": positions,
    }


def test_without_a_drafter_no_drafts_are_counted():
    metrics = Metrics("mock", AsyncEngine(Engine(MockRunner(1, 64, clock=FakeClock()), EngineConfig())))
    assert all(not values for values in drafts(metrics.text()).values())
