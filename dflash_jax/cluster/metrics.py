"""The metrics of all engines as one text."""

import re
from collections.abc import Mapping

# A family of metrics: its name, its comments, and its samples, as prometheus_client writes them.
_FAMILY = re.compile(rb"# HELP (\S+) .*\n# TYPE .*\n((?:[^#\n].*\n)*)")
_ENGINE = re.compile(rb'(?<=[{,])engine="(?:[^"\\]|\\.)*"')


def _labelled(sample: bytes, label: bytes) -> bytes:
    """A line of a sample whose label ``engine`` is ``label``."""
    if b'engine="' in sample:
        return _ENGINE.sub(label, sample, count=1)
    name, brace, rest = sample.partition(b"{")
    if not brace:
        name, _, rest = sample.partition(b" ")
        rest = b"} " + rest
    return b"%s{%s%s%s" % (name, label, b"," if brace else b"", rest)


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Prometheus' text of several engines.

    It moves lines, since reading and writing each sample would hold the interpreter for a second where there are many
    engines.

    Args:
        texts: The text of each, by the name of the engine, which takes the place of the label ``engine``.
    """
    families: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        label = b'engine="%s"' % name.encode()
        for family in _FAMILY.finditer(text):
            head = text[family.start() : family.start(2)]
            lines = families.setdefault(family[1], [head])
            lines += [_labelled(sample, label) for sample in family[2].splitlines(keepends=True)]
    count = b"# HELP dflash:replicas Engines that answer.\n# TYPE dflash:replicas gauge\ndflash:replicas %d\n"
    return b"".join(line for lines in families.values() for line in lines) + count % len(texts)
