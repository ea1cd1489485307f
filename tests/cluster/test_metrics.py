from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.cluster.metrics import merged
from dflash_jax.cluster.relay import Counts

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
    text = merged({"a": TEXT % (1, 10), "b": TEXT % (2, 20)}, Counts(resumed=4, repeated=5, failed=6)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = {sample.labels["engine"]: sample.value for sample in families["vllm:num_requests_running"].samples}
    assert running == {"a": 1, "b": 2}
    assert 'vllm:generation_tokens_total{engine="b",model_name="m"} 20.0' in text
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    assert text.count("# TYPE vllm:e2e_request_latency_seconds histogram") == 1
    for line in ("replicas 2.0", "cluster_resumed_total 4.0", "cluster_repeated_total 5.0", "cluster_failed_total 6.0"):
        assert f"\ndflash:{line}\n" in text
