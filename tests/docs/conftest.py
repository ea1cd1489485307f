"""The server of tests/server, for the pages' requests."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("server_fixtures", Path(__file__).parents[1] / "server" / "conftest.py")
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
llm = _fixtures.llm


@pytest.fixture(scope="session")
def server(llm):
    """A server without a warm-up: programs are compiled when a request needs them."""
    engine = _fixtures.started(llm, prepared=False)
    serving = _fixtures.Serving(llm, engine, ["dflash-tiny"], info={"model_path": "bundled"})
    serving.is_ready = True
    running = _fixtures.Running(serving)
    yield running
    running.stop()
    engine.stop()
