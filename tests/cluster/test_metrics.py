import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.cluster.fleet import merged

TEXT = """# HELP vllm:num_requests_running Requests in a slot.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} %d
# HELP vllm:generation_tokens_total New tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} %d
# HELP vllm:e2e_request_latency_seconds Arrival to last token.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 3
vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 3
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 1.5
"""


def test_metrics_of_all_replicas_have_the_replica_as_their_engine():
    texts = {"a": TEXT % (1, 10), "b": TEXT % (2, 20)}
    text = merged({name: text.encode() for name, text in texts.items()}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = {sample.labels["engine"]: sample.value for sample in families["vllm:num_requests_running"].samples}
    assert running == {"a": 1, "b": 2}
    assert 'vllm:generation_tokens_total{engine="b",model_name="m"} 20' in text
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    assert text.count("# TYPE vllm:e2e_request_latency_seconds histogram") == 1
    assert text.endswith("\ndflash:replicas 2\n")


@pytest.mark.parametrize("replicas", [["a"], ["a", "b", "c"]], ids=len)
def test_each_sample_is_there_once_for_each_replica_whatever_its_labels(replicas):
    """Against prometheus_client's own reading of the text."""
    registry, odd = CollectorRegistry(), 'a "b\\c", engine="1"}\n{'
    Gauge("plain", "No labels,\nand # HELP of two lines.", registry=registry).set(1.5)
    Gauge("none", "", ["x"], registry=registry)
    Counter("odd", "Odd labels.", ["engine", "x"], registry=registry).labels("0", odd).inc(2)
    Counter("first", "Another name before it.", ["an_engine", "engine"], registry=registry).labels("y", odd).inc()
    Histogram("without", "Labels, of which none is engine.", ["x"], registry=registry).labels(odd).observe(3)
    text = generate_latest(registry)
    found = merged(dict.fromkeys(replicas, text)).decode()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(found)
        for sample in family.samples
        if not family.name.startswith("dflash:")
    }
    assert samples == {
        (sample.name, tuple(sorted({**sample.labels, "engine": name}.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        for name in replicas
    }
    heads = [line for line in found.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
