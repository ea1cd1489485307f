"""One cell of a table: a task at a concurrency with a method, from the first question to the last answer."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from dflash_jax.benchmarking.clients import SIDES, Answer, Asking, Client, Drafts

SAMPLES = 2000


def interval(tokens: Sequence[int], rounds: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """95 % interval of tokens a round, by bootstrap over conversations.

    Args:
        tokens: Tokens of each conversation.
        rounds: Rounds of each conversation.
        seed: Of the resampling.
    """
    samples = np.random.default_rng(seed).integers(len(tokens), size=(SAMPLES, len(tokens)))
    ratios = np.asarray(tokens, float)[samples].sum(1) / np.maximum(np.asarray(rounds, float)[samples].sum(1), 1)
    return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def by_drafter(drafts: Drafts) -> dict[str, dict[str, list]]:
    """Numbers of drafts as in a cell: drafter → side → number at each place."""
    names = sorted({name for name, _, _ in drafts})
    most = {name: 1 + max(place for other, _, place in drafts if other == name) for name in names}
    return {name: {side: [drafts[name, side, i] for i in range(most[name])] for side in SIDES} for name in names}


async def converse(client: Client, turns: Sequence[str], asking: Asking) -> list[Answer]:
    """Asks one turn after the other. Earlier answers are sent without their thoughts."""
    messages, answers = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(await client.answer(messages, asking))
        messages.append({"role": "assistant", "content": answers[-1].text.rpartition("</think>")[2].lstrip("\n")})
    return answers


async def measure(
    client: Client, talks: Sequence[Sequence[str]], concurrency: int, asking: Asking, on_answer: Callable[[], object]
) -> dict:
    """Measures a cell.

    Args:
        client: Answers the questions.
        talks: The user's turns of each conversation.
        concurrency: Conversations at a time.
        asking: How each question is asked.
        on_answer: Called after each conversation.

    Returns:
        The cell's figures. A conversation that fails is counted under ``errors``; ``failed`` is the reason where all
        fail.
    """
    places, done, errors = asyncio.Semaphore(concurrency), [], []

    async def one(turns) -> None:
        async with places:
            try:
                done.append(await converse(client, turns, asking))
            except (ValueError, RuntimeError) as e:
                errors.append(str(e))
            on_answer()

    before, start = await client.counters(), time.perf_counter()
    await asyncio.gather(*(one(turns) for turns in talks))
    seconds, after = time.perf_counter() - start, await client.counters()
    if not done:
        return {"failed": errors[0]}
    answers = [a for talk in done for a in talk]
    tokens = sum(a.tokens for a in answers)
    between = [a.between_s for a in answers if a.between_s is not None]
    cell = {
        "conversations": len(done),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "first_token_ms": round(1e3 * statistics.median(a.first_token_s for a in answers), 2),
        "inter_token_ms": round(1e3 * statistics.median(between), 3) if between else None,
    }
    if errors:
        cell |= {"errors": len(errors), "first_error": errors[0]}
    if all(a.rounds for a in answers):
        by_talk = [(sum(a.tokens for a in talk), sum(a.rounds for a in talk)) for talk in done]
        counts, rounds = zip(*by_talk, strict=True)
        low, high = interval(counts, rounds)
        cell |= {"acceptance_length": round(sum(counts) / sum(rounds), 3)}
        cell |= {"acceptance_low": round(low, 3), "acceptance_high": round(high, 3)}
        cell["drafters"] = by_drafter(sum((a.drafts for a in answers), Counter()))
    elif before and after and after.rounds > before.rounds:
        accepted, rounds = after.accepted - before.accepted, after.rounds - before.rounds
        cell |= {"acceptance_length": round(1 + accepted / rounds, 3)}
        cell["drafters"] = by_drafter(after.drafts - before.drafts)
    elif stated := await client.acceptance():
        cell["acceptance_length"] = round(stated, 3)
    return cell
