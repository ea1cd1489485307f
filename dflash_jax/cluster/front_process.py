"""A front of a cluster: ``python -m dflash_jax.cluster.front_process FD``, which its ingress starts."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax import protocol
from dflash_jax.server import supervised
from dflash_jax.server.front_process import FrontProcess


class Engines(supervised.Record):
    """To a front: the engines that are announced, which take the place of those of the record before.

    Attributes:
        secret: What fronts and engines prove to each other.
        engines: Name, host and port of each.
    """

    secret: bytes
    engines: list[tuple[str, str, int]]


def words_of(args: Namespace) -> list[str]:
    """Arguments as the words of a front's first record: other hosts have other files and variables."""
    return [json.dumps(vars(args))]


def arguments_of(words: Sequence[str]) -> tuple[Namespace, None]:
    """The arguments of `words_of`, in which tuples have become lists, and no system."""
    return Namespace(**json.loads(words[0])), None


class ClusterFront(FrontProcess):
    """Answers HTTP on an ingress's listening socket, for all engines of the cluster."""

    parse = staticmethod(arguments_of)
    records = supervised.ToChild | Engines

    def __init__(self):
        super().__init__()
        self._engines: Engines | None = None
        # The connections to engines, by name and address.
        self._links: dict[tuple[str, str, int], Any] = {}

    def receive(self, record: Any) -> None:
        """Takes a record of the supervisor."""
        if isinstance(record, Engines):
            self._engines = record
            self._connect_all()
        else:
            super().receive(record)

    def new_client(self) -> Any:
        """A `Fleet` in place of an `EngineClient`."""
        from dflash_jax.cluster.fleet import Fleet

        self._client = fleet = Fleet(self.args.wait_s)
        self._connect_all()
        return fleet

    def facts_of(self, hello: protocol.Hello) -> dict[str, Any]:
        """See `FrontProcess`. Where the engine's host has files that this one has not, the hub has them."""
        from dflash_jax.checkpoint.hub import TEXT_PATTERNS, resolve

        args, facts = self.args, dict(hello.model)
        if not Path(facts["directory"]).is_dir():
            directory = resolve(hello.info["model_path"], args.revision, args.download_dir, TEXT_PATTERNS)
            if facts["tokenizer_directory"] == facts["directory"]:
                facts["tokenizer_directory"] = str(directory)
            facts["directory"] = str(directory)
        if (tokenizer := facts["tokenizer_directory"]) is not None and not Path(tokenizer).is_dir():
            directory = resolve(args.tokenizer, download_dir=args.download_dir, patterns=TEXT_PATTERNS)
            facts["tokenizer_directory"] = str(directory)
        return facts

    def take_model(self, model: Any) -> None:
        """See `FrontProcess`."""
        self._client.markers = frozenset() if model.tokenizer is None else model.tokenizer.markers

    def _connect_all(self) -> None:
        """Connects to the engines that are announced, and leaves the others."""
        if self._client is None or self._engines is None:
            return
        from dflash_jax.cluster.link import Link, tls_of

        tls, announced = tls_of(self.args), set(self._engines.engines)
        for key, link in self._links.items():
            self._client.set_leaving(link, key not in announced)
        for key in announced - self._links.keys():
            name, host, port = key
            self._links[key] = Link(self._client, name, (host, port), self._engines.secret, tls)
            self._begin(self._keep(key))

    async def _keep(self, key: tuple[str, str, int]) -> None:
        try:
            await self._links[key].run()
        finally:
            # At once, so that an engine that is announced again has a new link.
            del self._links[key]


if __name__ == "__main__":
    supervised.run_child(ClusterFront)
