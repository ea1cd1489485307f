"""Engines that the tests of this folder share."""

import pytest

from tests.server.conftest import NAME, hosted, llm, started

__all__ = ["llm"]


@pytest.fixture(scope="session")
def hosts(llm):
    """Hosts of two engines, by the name of the engine."""
    hosts = {name: hosted(llm, started(llm, prepared=name == "a"), NAME) for name in "ab"}
    yield hosts
    for host in hosts.values():
        host.stop_workers()
        host.engine.stop()
