"""One of two processes that run one model; `test_hosts.py` starts them. The first leads, and checks what it gets."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.lead import Follower, Leader
from dflash_jax.engine.request import Request
from dflash_jax.engine.token_rules import Rules, TokenRules
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.parallel import distributed
from dflash_jax.parallel.group import joined
from dflash_jax.parallel.sharding import Layout, parameter_specs, place
from tests import tiny
from tests.engine.load import CAPACITY, alone, engine_for, margin, some_requests, under_load
from tools.equality import equal_or_tie

LAYOUT = Layout(data=2, tensor=2)
# Few programs: each is compiled by both processes.
OPTIONS = {"prefill_sizes": (8,), "slots": 2, "prefill_batch_tokens": 0}


def divided(module, abstract):
    """``module`` over the devices of both processes, the same weights."""
    shape = abstract(module.config, layout=LAYOUT)
    shardings = [NamedSharding(LAYOUT.mesh(), spec) for spec in parameter_specs(shape)]
    leaves = [place(np.asarray(x), s) for x, s in zip(jax.tree.leaves(module), shardings, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def requests(count: int) -> list[dict]:
    wanted = some_requests(0, count, tiny.VOCAB)
    for each in wanted:
        each["prompt"] = each["prompt"][:40]
    return wanted


def of_one_process(target, wanted: list[dict]) -> list[tuple]:
    return alone(engine_for(Executables(target, None), (1,), **OPTIONS | {"slots": 1, "prefix_bytes": 0}), wanted)


def until_killed(engine: Engine, params) -> None:
    """Runs requests until the other process is killed, which ends this one."""
    endless = replace(params, max_tokens=CAPACITY - 5, logprobs=None)
    while True:
        engine.submit(Request([2, 3, 4], endless))
        while engine.has_work:
            engine.step()


def lead_short(group, target, programs: Executables) -> None:
    """Two requests at a time, with drafts."""
    wanted = requests(4)
    expected = of_one_process(target, wanted)
    with group.turn():
        plain = engine_for(programs, (8,), **OPTIONS, prefix_bytes=0)
        runner = Leader(group, (programs,)).runner(programs, 2, CAPACITY, plain.runner.settings, plain.runner.pages)
        engine = Engine(runner, plain.config, plain.policy)
        answers = [Request(**each, block_size=8) for each in wanted]
        for each in answers:
            engine.submit(each)
        while engine.has_work:
            engine.step()
        for (right, _), each in zip(expected, answers, strict=True):
            equal_or_tie(right.tokens, each.tokens, lambda at, right=right: margin(target, right, at))
        print(json.dumps({"tokens": sum(len(each.tokens) for each in answers)}), flush=True)
        until_killed(engine, wanted[0]["params"])


def lead(group, target, programs: Executables) -> None:
    wanted = requests(12)
    expected = of_one_process(target, wanted)
    with group.turn():
        leader = Leader(group, (programs,))
        plain = engine_for(programs, **OPTIONS, prefix_bytes=200_000, prefix_host_bytes=10**8)
        runner = leader.runner(programs, 2, CAPACITY, plain.runner.settings, plain.runner.pages)
        engine = Engine(runner, plain.config, plain.policy)
        under_load(engine, target, wanted, expected, 40, seed=1)
        masked = Request(**wanted[0], mask=TokenRules(Rules(bad_words=((60,),)), tiny.VOCAB), block_size=8)
        scored = Request(**wanted[1] | {"params": replace(wanted[1]["params"], prompt_logprobs=1)})
        engine.submit(masked)
        engine.submit(scored)
        while engine.has_work:
            engine.step()
        equal_or_tie(expected[1][0].tokens, scored.tokens, lambda at: margin(target, expected[1][0], at))
        found = {"cached": engine.statistics.cached_tokens, "host_hits": engine.prefix_cache.tiers.host.hits}
        found |= {"masked": masked.tokens, "scored": len(scored.prompt_entries) - len(scored.prompt) + 1}
        print(json.dumps(found), flush=True)
        until_killed(engine, wanted[0]["params"])


def main() -> None:
    distributed.start()
    group = joined(0)
    is_short = sys.argv[1:] == ["short"]
    target = tiny.target("a" if is_short else "da", moe="" if is_short else "1")
    drafter = tiny.drafter(target)
    programs = Executables(divided(target, abstract_decoder), divided(drafter, abstract_drafter))
    if group.leads:
        (lead_short if is_short else lead)(group, target, programs)
    else:
        Follower(group, (programs,)).run()


if __name__ == "__main__":
    main()
