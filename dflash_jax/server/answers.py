"""Parts that answers of several endpoints share: usage, times, log-probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, compress
from math import inf, isfinite, isnan, nan

from dflash_jax.engine.statistics import Rounds
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import MEDIA_STEPS
from dflash_jax.server.errors import dumped
from dflash_jax.server.schema import OpenAiSampling, StreamOptions
from dflash_jax.server.serving import Serving

# OpenAI's log-probability of an impossible token: JSON has no infinity.
IMPOSSIBLE = -9999.0


class Totals:
    """Token counts and times of a request's sequences while these grow.

    `take` counts what one sequence has got since it was last counted, at a cost that depends neither on the number of
    sequences nor on their lengths.

    Args:
        sequences: All sequences; choices of one prompt are neighbours.
        choices: Sequences of each prompt.
        draft_places: The largest draft length of each drafter, by name.
    """

    def __init__(self, sequences: Sequence[TextSequence], choices: int, draft_places: Mapping[str, int]):
        self._sequences, self._choices = sequences, choices
        self._prompt_tokens = sum(len(r.request.prompt) for r in sequences[::choices])
        self._draft_places, self._cached = draft_places, dict[int, int]()
        # Rounds of each sequence that are counted, sequences that may have more, and the sum.
        self._counted, self._grown, self._rounds = dict[int, Rounds](), set[int](), Rounds()
        self._cached_tokens = 0
        # The first sequence with a token, and how many have one and have ended; when a prompt was first in the caches,
        # and when a sequence ended last.
        self._first: int | None = None
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._ready, self._finished = inf, -inf

    def take_prompt(self, i: int) -> None:
        """Counts what the prefix cache had of the prompt of the sequence ``i``."""
        place = i - i % self._choices
        cached = self._sequences[place].request.cached
        self._cached_tokens += cached - self._cached.get(place, 0)
        self._cached[place] = cached

    def take(self, i: int) -> None:
        """Counts what the sequence ``i`` has got."""
        self.take_prompt(i)
        self._grown.add(i)
        times = self._sequences[i].request.times
        if not times.is_submitted or isnan(times.first_token):
            return
        if i not in self._begun:
            self._begun.add(i)
            self._first = i if self._first is None else min(i, self._first)
            self._ready = min(self._ready, times.ready)
        if not isnan(times.finished):
            self._ended.add(i)
            self._finished = max(self._finished, times.finished)

    @property
    def rounds(self) -> Rounds:
        """The rounds of all sequences."""
        for i in self._grown:
            self._rounds.update(now := self._sequences[i].rounds.copy())
            self._rounds.subtract(self._counted.get(i, ()))
            self._counted[i] = now
        self._grown.clear()
        return self._rounds

    def usage(self, reasoning_tokens: int = 0) -> dict:
        """Token counts of the request.

        Drafted tokens that were accepted are OpenAI's accepted_prediction_tokens; draft_rounds is the number of drafted
        blocks. The values of a dict are numbers, or dicts that always have the same keys: clients add them up.

        Args:
            reasoning_tokens: Tokens of reasoning among the new ones.
        """
        rounds = self.rounds
        tokens, accepted = rounds.tokens, rounds.accepted_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
            # SGLang's clients read this field.
            "reasoning_tokens": reasoning_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rounds.draft_tokens - accepted,
                "draft_rounds": rounds.drafts,
            },
            "drafters": drafters(rounds, self._draft_places),
        }

    def timings(self, now: float, plain_round_s: float | None = None) -> dict:
        """Decoding time and rate, and how they compare with plain decoding.

        Args:
            now: The engine's clock in seconds, for sequences that are not finished.
            plain_round_s: Measured seconds of a plain round, which yields one token for each sequence; None: not
                measured.

        Returns:
            ``decode_s``, seconds from the end of the first prefill to the last token; ``tokens_per_s``, new tokens per
            second of that time; ``speedup``, that rate over the one of plain rounds, None where these are not measured.
            ``draft_n`` and ``draft_n_accepted`` are llama.cpp's counts of drafts.
            Before the first token: ``media_fetch_s``, ``media_decode_s`` and ``media_tower_s`` of images and videos,
            and ``queue_s`` and ``prefill_s`` of the first sequence.
        """
        rounds = self.rounds
        before = {"draft_n": rounds.draft_tokens, "draft_n_accepted": rounds.accepted_tokens}
        before |= {f"media_{step}_s": self._sequences[0].preparation.get(step, 0.0) for step in MEDIA_STEPS}
        if self._first is None:
            return {"decode_s": 0.0, "tokens_per_s": 0.0, "speedup": None, **before, "queue_s": 0.0, "prefill_s": 0.0}
        first = self._sequences[self._first].request.times
        before |= {"queue_s": first.admitted - first.submitted, "prefill_s": first.first_token - first.admitted}
        seconds = (self._finished if len(self._ended) == len(self._begun) else now) - self._ready
        rate = rounds.tokens / max(seconds, 1e-9)
        speedup = None if plain_round_s is None else rate * plain_round_s / len(self._begun)
        return {"decode_s": seconds, "tokens_per_s": rate, "speedup": speedup, **before}


def ended_totals(serving: Serving, sequences: Sequence[TextSequence], choices: int = 1) -> Totals:
    """`Totals` of sequences that have ended."""
    totals = Totals(sequences, choices, serving.llm.draft_places)
    for i in range(len(sequences)):
        totals.take(i)
    return totals


def drafters(rounds: Rounds, draft_places: Mapping[str, int]) -> dict[str, dict]:
    """Rounds with drafts, drafts and accepted ones of each drafter.

    Args:
        rounds: The rounds.
        draft_places: As in `Totals`. Keys are these in every answer, so that usages can be added up: of other drafters,
            which another engine of a cluster may have, metrics tell.
    """

    def one(rounds: Rounds, places: int) -> dict:
        counts = [{str(i): each[i] for i in range(places)} for each in rounds.by_place(places)]
        return {"rounds": rounds.total(), "drafted_per_pos": counts[0], "accepted_per_pos": counts[1]}

    by_drafter = rounds.by_drafter(draft_places)
    return {name: one(by_drafter[name], places) for name, places in draft_places.items()}


def spec_tokens_details(rounds: Rounds) -> dict:
    """SGLang's counts of drafts. Plain rounds count as rounds that accepted none."""
    return {
        "spec_accept_rate": rounds.acceptance_rate,
        "spec_accept_length": rounds.acceptance_length,
        "spec_num_correct_drafts": rounds.accepted_tokens,
        "spec_num_proposed_drafts": rounds.draft_tokens,
        "spec_verify_ct": rounds.total(),
        "spec_correct_drafts_histogram": rounds.histogram(),
    }


def speculative_decoding(sequence: TextSequence, most: int, is_detailed: bool) -> dict:
    """The counts of a sequence's drafts in vLLM's shape, without plain rounds.

    Args:
        sequence: The sequence.
        most: The largest draft length.
        is_detailed: Whether each round is counted, too.
    """
    totals = Rounds({each: count for each, count in sequence.rounds.items() if each[1]})
    value = {
        "mean_acceptance_length": totals.acceptance_length or 1.0,
        "draft_acceptance_rate": totals.acceptance_rate,
        "acceptance_histogram": totals.histogram(most),
        "num_spec_steps": totals.total(),
        "num_accepted_draft_tokens": totals.accepted_tokens,
        "num_draft_tokens": totals.draft_tokens,
        "num_spec_tokens": most,
    }
    if is_detailed:
        value["per_step_accepted"] = [yielded - 1 for yielded in compress(sequence.yielded, sequence.drafted)]
        value["per_step_drafted"] = [*filter(None, sequence.drafted)]
    return value


def request_metrics(serving: Serving, sequences: Sequence[TextSequence]) -> dict:
    """What the server adds of a request with one sequence, in vLLM's shape: times in milliseconds, counts of drafts.

    The result is {} for several sequences and for one that is not submitted. Unknown times are left out.
    ``time_to_first_token_ms`` and ``tokens_per_second`` count from the moment at which the sequence gets a slot, as in
    vLLM. Images and videos have ``media_fetch_time_ms``, ``media_decode_time_ms`` and ``media_tower_time_ms`` before.
    """
    added = serving.additions
    if len(sequences) != 1 or not sequences[0].request.times.is_submitted:
        return {}
    found = request_times(sequences[0]) if added.metrics else {}
    if added.drafts != "none" and serving.llm.draft_places:
        most = max(serving.llm.draft_places.values())
        found["speculative_decoding"] = speculative_decoding(sequences[0], most, added.drafts == "detailed")
    return {"metrics": found} if found else {}


def request_times(sequence: TextSequence) -> dict:
    """The times of `request_metrics`."""
    times, new = sequence.request.times, len(sequence.request.tokens)
    from_slot, decoding = times.finished - times.admitted, times.finished - times.first_token
    values = {
        "time_to_first_token_ms": 1e3 * (times.first_token - times.admitted),
        "generation_time_ms": 1e3 * decoding,
        "queue_time_ms": 1e3 * (times.admitted - times.submitted),
        "mean_itl_ms": 1e3 * decoding / (new - 1) if new > 1 else nan,
        "tokens_per_second": new / from_slot if from_slot > 0 else nan,
    }
    values |= {f"media_{step}_time_ms": 1e3 * seconds for step, seconds in sequence.preparation.items()}
    return {name: value for name, value in values.items() if not isnan(value)}


def stream_totals(
    serving: Serving, options: StreamOptions, totals: Totals, reasoning_tokens: int = 0, is_last: bool = False
) -> dict:
    """The fields ``usage`` and ``timings`` of a chunk, as a stream's ``options`` ask for them."""
    if not options.include_usage:
        return {}
    if not (is_last or options.continuous_usage_stats):
        return {"usage": None}
    engine = serving.engine
    timings = {"timings": totals.timings(engine.clock, engine.plain_round_s)} if options.include_timings else {}
    return {"usage": totals.usage(reasoning_tokens), **timings}


def sglext(body: OpenAiSampling, totals: Totals) -> dict:
    """SGLang's field ``sglext`` of an answer, where the request asks for it."""
    if not body.return_spec_tokens_details:
        return {}
    return {"sglext": {"spec_tokens_details": spec_tokens_details(totals.rounds)}}


def end_of_stream(
    serving: Serving,
    body: OpenAiSampling,
    options: StreamOptions,
    totals: Totals,
    sequences: Sequence[TextSequence],
    reasoning_tokens: int = 0,
) -> dict:
    """The fields of a stream's last chunk, which has no choice; {} where there is no such chunk."""
    last = stream_totals(serving, options, totals, reasoning_tokens, is_last=True)
    if options.include_usage:
        last |= request_metrics(serving, sequences)
    return last | sglext(body, totals)


def finite(logprob: float) -> float:
    """``logprob``, or `IMPOSSIBLE` for an infinite one."""
    return logprob if isfinite(logprob) else IMPOSSIBLE


def stop_reasons(sequence: TextSequence, stop_ids: Sequence[int]) -> dict:
    """Why a text stopped, under vLLM's name and SGLang's.

    vLLM's is the stop string or token of the request; the checkpoint's ``stop_ids`` count as no reason.
    """
    matched = sequence.matched
    is_default = matched in stop_ids and matched not in sequence.request.params.stop_token_ids
    return {"stop_reason": None if is_default else matched, "matched_stop": matched}


def token_text(tokenizer: Tokenizer | None, token_id: int, as_id: bool = False) -> tuple[str, list[int]]:
    """A token's text and bytes; with ``as_id`` the text is "token_id:N"."""
    raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    text = f"token_id:{token_id}" if as_id or tokenizer is None else raw.decode(errors="replace")
    return text, list(raw)


def proposals(tokenizer: Tokenizer | None, piece: Piece) -> list[dict]:
    """The rounds of a piece whose drafts were recorded.

    Returns:
        For each round ``proposed``, the texts of the drafted tokens in order; ``accepted``, how many of them were; and
        ``token``, the text of the target's own token, which the round ends with.
    """
    rounds, start = [], 0
    for drafts, count in zip(piece.proposals or [], piece.acceptance_lengths, strict=True):
        start += count
        rounds.append(
            {
                "proposed": [token_text(tokenizer, draft)[0] for draft in drafts],
                "accepted": count - 1,
                "token": token_text(tokenizer, piece.token_ids[start - 1])[0],
            }
        )
    return rounds


def prompt_entry(tokenizer: Tokenizer | None, entry: dict) -> dict:
    """An entry for a token of the prompt in vLLM's shape: log-probabilities of the token and of the likeliest ones."""
    values = {entry["token_id"]: entry["logprob"]} | entry["top"]
    ranks = {t: i + 1 for i, t in enumerate(entry["top"])}
    return {
        str(t): {"logprob": finite(v), "rank": ranks.get(t), "decoded_token": token_text(tokenizer, t)[0]}
        for t, v in values.items()
    }


def prompt_logprobs(tokenizer: Tokenizer | None, sequence: TextSequence) -> Iterator[bytes | None] | None:
    """Yields entries for a prompt in vLLM's shape as JSON, None for its first token; None where nothing is computed."""
    if sequence.request.prompt_logprobs is None:
        return None
    return chain([None], (dumped(prompt_entry(tokenizer, entry)) for entry in sequence.request.prompt_entries))


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[dict], *, as_ids: bool = False) -> Iterator[bytes]:
    """Yields OpenAI's log-probabilities for chats, each as JSON.

    As in vLLM, the drawn token is among the likeliest N: it replaces the last of them where it is less likely. Tokens
    that the request names follow.

    Args:
        tokenizer: None for a checkpoint without one.
        entries: A dict for each token.
        as_ids: Whether tokens are written as "token_id:N".
    """

    def one(token_id: int, logprob: float) -> dict:
        text, raw = token_text(tokenizer, token_id, as_ids)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    def listed(entry: dict) -> list[dict]:
        top = list(entry["top"].items())
        if top and entry["token_id"] not in entry["top"]:
            top[-1] = entry["token_id"], entry["logprob"]
        return [one(token, value) for token, value in (dict(top) | entry.get("named", {})).items()]

    return (dumped(one(e["token_id"], e["logprob"]) | {"top_logprobs": listed(e)}) for e in entries)


def completion_logprobs(
    tokenizer: Tokenizer | None,
    entries: Sequence[dict],
    starts: Sequence[int],
    *,
    as_ids: bool = False,
) -> dict:
    """OpenAI's log-probabilities for completions, as `stream.json_parts` takes them.

    As in vLLM, the drawn token comes first, then tokens that the request names, then the likeliest N.

    Args:
        tokenizer: None for a checkpoint without one.
        entries: A dict for each token; its logprob is None for the first token of a prompt.
        starts: Where each token begins in the choice's text; empty without a tokenizer.
        as_ids: As in `chat_logprobs`.
    """

    def text(token_id: int) -> str:
        return token_text(tokenizer, token_id, as_ids)[0]

    def named(entry: dict) -> dict | None:
        if entry["logprob"] is None:
            return None
        values = {entry["token_id"]: entry["logprob"]} | entry.get("named", {}) | entry["top"]
        values_by_text: dict[str, float] = {}
        for token, value in values.items():
            # Of two tokens with one text, the drawn one wins, then a named one, then the likelier one.
            values_by_text.setdefault(text(token), finite(value))
        return values_by_text

    return {
        "tokens": (dumped(text(e["token_id"])) for e in entries),
        "token_logprobs": (dumped(e["logprob"] and finite(e["logprob"])) for e in entries),
        "top_logprobs": (dumped(named(e)) for e in entries),
        "text_offset": list(starts) if tokenizer is not None else [0] * len(entries),
    }
