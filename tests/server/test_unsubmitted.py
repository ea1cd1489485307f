"""Masks of sequences that the engine never gets are closed with their submission, not by the garbage collector."""

import gc

import pytest

from dflash_jax.errors import QueueFullError
from tests.server.conftest import MESSAGES, wait_until

FORM = {"regex": "[ab]{4}x", "max_tokens": 8}
# What is wrong with each, after masks were made.
BODIES = {
    "bad words of a later prompt": ("/generate", {"text": ["x", "x"]}, 400),
    "a queue that is full": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, 429),
    "a queue that is full, later": ("/v1/completions", {"prompt": ["x", "y"], "stream": True}, 429),
}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("name", BODIES)
def test_masks_are_closed_with_the_request(quiet, name, monkeypatch, no_collector):
    path, body, status = BODIES[name]
    if path == "/generate":
        sampling = {"regex": FORM["regex"], "max_new_tokens": 8}
        body = body | {"sampling_params": [sampling, sampling | {"bad_words": [" "]}]}
    else:
        body = FORM | body
    if status == 429:

        def full(request):
            raise QueueFullError("0 requests are waiting: 0 may")

        monkeypatch.setattr(quiet.host.engine.engine, "check", full)
    # Whatever keeps a mask, an error's traceback say, is no reason for it to stay open.
    kept, real = [], quiet.serving.llm.new_sequence
    monkeypatch.setattr(
        quiet.serving.llm, "new_sequence", lambda *a, mask, **o: (kept.append(mask), real(*a, mask=mask, **o))[1]
    )
    found = quiet.post(path, **body)
    assert found.status_code == status, found.text
    assert kept
    # The answer is sent before its request ends.
    assert wait_until(lambda: all(mask._is_closed for mask in kept))
    assert not any(grammar.users for grammar in quiet.host.grammar._cache.values())


def test_masks_of_what_runs_are_closed_too(quiet):
    found = quiet.post("/v1/completions", **FORM, prompt=["x", "y"], n=2)
    assert found.status_code == 200
    assert quiet.idle()
    assert not any(grammar.users for grammar in quiet.host.grammar._cache.values())
