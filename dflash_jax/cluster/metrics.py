"""The metrics of all replicas as one text."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_jax.cluster.relay import Counts

# A family of metrics: its name, its comments, and its samples, as prometheus_client writes them.
_FAMILY = re.compile(rb"# HELP (\S+) .*\n# TYPE .*\n((?:[^#\n].*\n)*)")
_ENGINE = re.compile(rb'(?<=[{,])engine="(?:[^"\\]|\\.)*"')


class _Own(Collector):
    """The ingress's own metrics."""

    def __init__(self, replicas: int, counts: Counts):
        self._replicas, self._counts = replicas, counts

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("dflash:replicas", "Replicas that answer.", self._replicas)
        for name, text in (
            ("resumed", "Streams that went on from another replica."),
            ("repeated", "Requests that were sent to another replica from the beginning."),
            ("failed", "Requests that ended with an error for want of a replica."),
        ):
            yield CounterMetricFamily(f"dflash:cluster_{name}", text, getattr(self._counts, name))


def _labelled(sample: bytes, label: bytes) -> bytes:
    """A line of a sample whose label ``engine`` is ``label``."""
    if b'engine="' in sample:
        return _ENGINE.sub(label, sample, count=1)
    name, brace, rest = sample.partition(b"{")
    if not brace:
        name, _, rest = sample.partition(b" ")
        rest = b"} " + rest
    return b"%s{%s%s%s" % (name, label, b"," if brace else b"", rest)


def merged(texts: Mapping[str, bytes], counts: Counts) -> bytes:
    """Prometheus' text of several replicas.

    It moves lines, since reading and writing each sample would hold the interpreter for a second where there are many
    replicas.

    Args:
        texts: The text of each, by the name of the replica, which takes the place of the label ``engine``.
        counts: Totals of the ingress.
    """
    families: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        label = b'engine="%s"' % name.encode()
        for family in _FAMILY.finditer(text):
            head = text[family.start() : family.start(2)]
            lines = families.setdefault(family[1], [head])
            lines += [_labelled(sample, label) for sample in family[2].splitlines(keepends=True)]
    own = CollectorRegistry(auto_describe=False)
    own.register(_Own(len(texts), counts))
    return b"".join(line for lines in families.values() for line in lines) + generate_latest(own)
