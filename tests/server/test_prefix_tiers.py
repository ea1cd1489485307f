"""Conversations whose prefixes are in two tiers, through HTTP."""

import copy
import re

import pytest

from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import NAME, OFF, Running, hosted, started

TURNS, NAMES = 5, ("ada", "grace", "emmy")


@pytest.fixture(scope="module")
def tiered(llm):
    """A server whose device has room for a few snapshots, and whose host has it for all."""
    other = copy.copy(llm)
    runner = llm.new_engine(llm.programs, 4, 1024, prefill_sizes=(16, 64)).runner
    # A prefix is a snapshot and, here, one or two pages of each kind.
    prefix = runner.bytes(runner.snapshot(0)) + sum(runner.page_bytes)
    other.prefix_bytes, other.prefix_host_bytes = 6 * prefix, 2**28
    # Compiles what these requests need.
    engine = started(other, prepared=False)
    host = hosted(other, engine)
    serving = Serving(other, in_process(host), [NAME])
    running = Running(serving, host)
    yield running
    running.stop()
    engine.stop()


def answer(server: Running, messages: list[dict], **options) -> tuple[str, int, int]:
    """(text, prompt tokens, those of them that came from the cache)."""
    # Prefixes with and without the drafter's part are different ones, and "auto" would choose by the time of rounds.
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "block_size": 1, "chat_template_kwargs": OFF}
    body |= options
    found = server.post("/v1/chat/completions", **body)
    assert found.status_code == 200, found.text
    usage = found.json()["usage"]
    text = found.json()["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def metrics(server: Running) -> dict[tuple[str, str], float]:
    """Values by name and tier."""
    text = server.http.get("/metrics").text
    lines = re.findall(r'^dflash:prefix_tier_(\w+?)(?:_total)?\{.*tier="(\w+)".*\} (\S+)$', text, re.M)
    return {(name, tier): float(value) for name, tier, value in lines}


def test_interleaved_conversations_prefill_their_new_tokens_only_and_say_the_same(tiered):
    talks = {
        name: [{"role": "system", "content": f"You answer {name}. " + "Be brief and exact. " * 6}] for name in NAMES
    }
    before = dict.fromkeys(NAMES, 0)
    for turn in range(TURNS):
        for name, messages in talks.items():
            question = f"Question {turn}: write the function `{name}_{turn}`, which limits a value to a range."
            messages.append({"role": "user", "content": question})
            text, prompt, cached = answer(tiered, messages)
            # A grid of 4,096 tokens has no cut here, and the header of the last answer is prefilled again.
            assert prompt - cached <= prompt - before[name] + 16
            assert turn == 0 or cached > 0
            messages.append({"role": "assistant", "content": text})
            before[name] = prompt
    found = metrics(tiered)
    assert found["hits", "host"] > 0
    assert found["evictions", "device"] > 0
    assert found["evictions", "host"] == 0
    assert found["misses", "host"] == found["misses", "device"] - found["hits", "host"] >= 1
    for tier in ("device", "host"):
        assert 0 < found["bytes", tier] <= found["budget_bytes", tier]
    # A salt shares nothing with the others.
    assert answer(tiered, talks["ada"][:2], cache_salt="mine")[2] == 0
    assert answer(tiered, talks["ada"][:2], cache_salt="mine")[2] > 0
    for *messages, last in talks.values():
        tiered.post("/reset_prefix_cache")
        assert answer(tiered, messages)[::2] == (last["content"], 0)


def test_a_reset_empties_both_tiers(tiered):
    messages = [{"role": "user", "content": "Write the function `sum`. " * 8}]
    answer(tiered, messages)
    assert metrics(tiered)["bytes", "device"] > 0
    assert tiered.post("/reset_prefix_cache").json()["success"]
    found = metrics(tiered)
    assert (found["bytes", "device"], found["bytes", "host"]) == (0, 0)
    assert answer(tiered, messages)[2] == 0
