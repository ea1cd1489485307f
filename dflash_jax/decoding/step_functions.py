"""What the compiled programs compute: functions of both models, a decode state and small arguments.

``rows`` names the rows of the state that take part. Those that return a state return it first.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from dflash_jax.decoding import batch_init, prefix_snapshot, speculative
from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.sampling import Logprobs, perturbed, process
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings, put_rows, take_rows
from dflash_jax.parallel.sharding import DATA

# Tokens of a row that one dispatch may bring.
REPORT_SIZE = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What a dispatch brought, small enough to read back every time: the new tokens [B, C] (``count`` [B] of them, the
    last of which may be no token, as `sampling.checked` says),
    what each of its ``rounds`` [B] yielded, accepted [B, C], and ``done`` bool [B]. logprobs: `Logprobs` [B, C], read
    where someone asked, or None."""

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    rounds: jax.Array
    done: jax.Array
    logprobs: Logprobs | None


def report(before: DecodeState, after: DecodeState, size: int) -> Report:
    """The difference between two states, at most ``size`` (static) tokens a row."""

    def places(start):
        return jnp.minimum(start[:, None] + jnp.arange(size), after.tokens.shape[1] - 1)

    def since(buffer, start):
        return jnp.take_along_axis(buffer, places(start), axis=1)

    held = jnp.arange(len(after.length)) if after.rows is None else after.rows
    return Report(
        since(after.tokens, before.length),
        after.length - before.length,
        since(after.accepted, before.rounds),
        after.rounds - before.rounds,
        after.done,
        jax.tree.map(lambda x: x[held[:, None], places(before.length)], after.logprobs),
    )


def gathered(tree):
    """All rows, on every device: any host may read them."""
    if jax.lax.axis_size(DATA) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, DATA, tiled=True), tree)


def prefill(target, drafter, state: DecodeState, rows, n, *, size: int, drafting: bool = True):
    drafter = drafter if drafting else None
    taken = speculative.prefill_chunk(target, drafter, take_rows(target.backend, state, rows), size, n)
    return put_rows(state, taken), gathered(taken.base)


def score(target, drafter, state: DecodeState, rows, n, *, size: int, top: int):
    taken, found = speculative.score_chunk(target, take_rows(target.backend, state, rows), size, n, top)
    return put_rows(state, taken), gathered(found)


def decode(target, drafter, state: DecodeState, rows, width, rounds, *, settings: Settings):
    drafter = drafter if settings.drafting else None
    before = replace(take_rows(target.backend, state, rows, settings.window), width=width)
    after = speculative.decode(target, drafter, before, rounds, REPORT_SIZE, settings)
    found = report(before, after, max(REPORT_SIZE, settings.window))
    return put_rows(state, replace(after, width=state.width[rows])), gathered(found)


def propose(target, drafter, state: DecodeState, rows, width, *, settings: Settings):
    drafter = drafter if settings.drafting else None
    taken = replace(take_rows(target.backend, state, rows), width=width)
    return gathered(speculative.window_of(target, drafter, taken, settings))


def verify(target, drafter, state: DecodeState, rows, width, block, *, settings: Settings):
    drafter = drafter if settings.drafting else None
    taken = replace(take_rows(target.backend, state, rows), width=width)
    return speculative.verify(target, taken, block, drafter.taps if drafter is not None else ())


def finish(target, drafter, state: DecodeState, rows, width, block, mask, verified, *, settings: Settings):
    drafter = drafter if settings.drafting else None
    before, (logits, features, record) = replace(take_rows(target.backend, state, rows), width=width), verified
    decided = speculative.decide(before, block, logits, mask)
    after = speculative.commit(target, drafter, before, decided, block, features, record, settings)
    found = report(before, after, settings.window)
    return put_rows(state, replace(after, width=state.width[rows])), gathered(found)


def draw(target, drafter, state: DecodeState):
    """Raw logits and what is maximised, [B, V] each, for the token behind the last known one."""
    settings = replace(PLAIN_SETTINGS, window=1)
    raw, _, _ = speculative.verify(target, state, speculative.window_of(target, None, state, settings))
    scores = perturbed(process(raw, state.sampling), state.sampling, state.length[:, None])
    return gathered(tuple(target.vocab.gather(x[:, 0], -1) for x in (raw, scores)))


def admit(target, drafter, state: DecodeState, rows, admission: Admission):
    return batch_init.admit(target, state, rows, admission), ()


def save(target, drafter, state: DecodeState, rows, start, *, size: int):
    return prefix_snapshot.save(state, rows, start, size)


def load(target, drafter, state: DecodeState, rows, start, segment):
    return prefix_snapshot.load(state, rows, start, segment), ()


def snapshot(target, drafter, state: DecodeState, rows):
    return prefix_snapshot.snapshot(state, rows)


def restore(target, drafter, state: DecodeState, rows, length, snapshot):
    return prefix_snapshot.restore(state, rows, length, snapshot), ()
