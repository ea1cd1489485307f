"""The metrics of all replicas as one text."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.cluster.relay import Counts


class _Merged:
    def __init__(self, texts: Mapping[str, str], counts: Counts):
        self._texts, self._counts = texts, counts

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [sample._replace(labels=sample.labels | {"engine": name}) for sample in family.samples]
        yield from merged.values()
        yield GaugeMetricFamily("dflash:replicas", "Replicas that answer.", len(self._texts))
        for name, text in (
            ("resumed", "Streams that went on from another replica."),
            ("repeated", "Requests that were sent to another replica from the beginning."),
            ("failed", "Requests that ended with an error for want of a replica."),
        ):
            yield CounterMetricFamily(f"dflash:cluster_{name}", text, getattr(self._counts, name))


def merged(texts: Mapping[str, str], counts: Counts) -> bytes:
    """Prometheus' text of several replicas.

    Args:
        texts: The text of each, by the name of the replica, which takes the place of the label ``engine``.
        counts: Totals of the ingress.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(texts, counts))
    return generate_latest(registry)
