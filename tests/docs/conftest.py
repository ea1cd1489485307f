"""The server of tests/server, for the pages' requests."""

import pytest

from dflash_jax.models import families
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import Running, hosted, llm, started

__all__ = ["llm", "server"]


@pytest.fixture(autouse=True)
def families_of_a_page_are_its_own(monkeypatch):
    """What a page registers is not known to the next test."""
    monkeypatch.setattr(families, "registered", {})


@pytest.fixture(scope="session")
def server(llm):
    """A server without a warm-up: programs are compiled when a request needs them."""
    engine = started(llm, prepared=False)
    host = hosted(llm, engine, info={"model_path": "bundled"})
    serving = Serving(llm, in_process(host), ["dflash-tiny"])
    running = Running(serving, host)
    yield running
    running.stop()
    engine.stop()
