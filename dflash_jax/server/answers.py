"""What answers have in common: usage, log-probabilities."""

from collections.abc import Sequence
from math import isfinite, isnan, nan

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.frontend.tokenizer import Tokenizer

# JSON has no infinity: what OpenAI says for a token that cannot come.
IMPOSSIBLE = -9999.0


def usage(
    rows: Sequence[TextSequence], choices: int, reasoning_tokens: int = 0, new: Sequence[TextSequence] | None = None
) -> dict:
    """Tokens of prompts with so many ``choices`` each, and of what was told of the rows ``new`` (None: of all).

    Drafted tokens that were accepted are OpenAI's accepted_prediction_tokens; draft_rounds is how many blocks were
    drafted.
    """
    prompt = sum(len(r.request.prompt) for r in rows[::choices])
    cached = sum(r.request.cached for r in rows[::choices])
    new = rows if new is None else new
    count = sum(r.num_tokens for r in new)
    drafts, drafted = sum(r.drafts for r in new), sum(r.draft_tokens for r in new)
    accepted = sum(n - 1 for r in new for n in r.accepted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        # SGLang's place for it.
        "reasoning_tokens": reasoning_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "draft_rounds": drafts,
        },
    }


def timings(rows: Sequence[TextSequence], now: float) -> dict:
    """Seconds from the end of the first prefill to the last token, or to ``now`` on the engine's clock while tokens are
    still to come, and new tokens per second of that time."""
    begun = [r.request.times for r in rows if r.request.times is not None]
    times = [t for t in begun if not isnan(t.first_token)]
    if not times:
        return {"decode_s": 0.0, "tokens_per_s": 0.0}
    seconds = max(now if isnan(t.finished) else t.finished for t in times) - min(t.ready for t in times)
    return {"decode_s": seconds, "tokens_per_s": sum(r.num_tokens for r in rows) / max(seconds, 1e-9)}


def request_metrics(rows: Sequence[TextSequence]) -> dict:
    """vLLM's times of a request with one sequence, in milliseconds; {} for several. What is not known is left out.

    Its ``time_to_first_token_ms`` begins when the sequence gets a slot; ``tokens_per_second`` counts from there, too.
    """
    times = rows[0].request.times if len(rows) == 1 else None
    if times is None:
        return {}
    new = len(rows[0].request.tokens)
    from_slot, decoding = times.finished - times.admitted, times.finished - times.first_token
    values = {
        "time_to_first_token_ms": 1e3 * (times.first_token - times.admitted),
        "generation_time_ms": 1e3 * decoding,
        "queue_time_ms": 1e3 * (times.admitted - times.submitted),
        "mean_itl_ms": 1e3 * decoding / (new - 1) if new > 1 else nan,
        "tokens_per_second": new / from_slot if from_slot > 0 else nan,
    }
    return {"metrics": {name: value for name, value in values.items() if not isnan(value)}}


def finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else IMPOSSIBLE


def stop_reasons(row: TextSequence, stop_ids: Sequence[int]) -> dict:
    """Why a text stopped: vLLM's name for the stop string or token that ended it, unless it is one of the checkpoint's
    own ``stop_ids``, and SGLang's."""
    matched = row.matched
    is_own = matched in stop_ids and matched not in row.request.params.stop_token_ids
    return {"stop_reason": None if is_own else matched, "matched_stop": matched}


def token_text(tokenizer: Tokenizer | None, token_id: int, as_id: bool = False) -> tuple[str, list[int]]:
    """A token as text, and its bytes; ``as_id``: with the text "token_id:N"."""
    raw = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    text = f"token_id:{token_id}" if as_id or tokenizer is None else raw.decode(errors="replace")
    return text, list(raw)


def prompt_entry(tokenizer: Tokenizer | None, entry: dict) -> dict:
    """vLLM's shape for a token of the prompt: of the token itself and the likeliest ones."""
    values = {entry["token_id"]: entry["logprob"]} | entry["top"]
    ranks = {t: i + 1 for i, t in enumerate(entry["top"])}
    return {
        str(t): {"logprob": finite(v), "rank": ranks.get(t), "decoded_token": token_text(tokenizer, t)[0]}
        for t, v in values.items()
    }


def prompt_logprobs(tokenizer: Tokenizer | None, row: TextSequence) -> list | None:
    """vLLM's list for a prompt, whose first token has none; None where they are not computed."""
    if row.request.prompt_logprobs is None:
        return None
    return [None, *(prompt_entry(tokenizer, entry) for entry in row.request.prompt_entries)]


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[dict], *, as_ids: bool = False) -> list[dict]:
    """OpenAI's shape for chats.

    The drawn token is among the likeliest N, as in vLLM: in place of the last of them where it is less likely. The
    tokens that the request names are behind them.

    Args:
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

    return [one(e["token_id"], e["logprob"]) | {"top_logprobs": listed(e)} for e in entries]


def completion_logprobs(
    tokenizer: Tokenizer | None,
    entries: Sequence[dict],
    starts: Sequence[int],
    *,
    as_ids: bool = False,
) -> dict:
    """OpenAI's older shape, for completions: the drawn token first, as in vLLM, those that the request names, and the
    likeliest N.

    Args:
        entries: A token each; with a logprob of None for the first token of a prompt, before which nothing is.
        starts: Where in the choice's text each token begins; empty without a tokenizer.
        as_ids: As in `chat_logprobs`.
    """

    def text(token_id: int) -> str:
        return token_text(tokenizer, token_id, as_ids)[0]

    def named(entry: dict) -> dict | None:
        if entry["logprob"] is None:
            return None
        values = {entry["token_id"]: entry["logprob"]} | entry.get("named", {}) | entry["top"]
        found: dict[str, float] = {}
        for token, value in values.items():
            # Of two tokens of one text, the drawn one counts, or else one that the request names, or the likelier one.
            found.setdefault(text(token), finite(value))
        return found

    return {
        "tokens": [text(e["token_id"]) for e in entries],
        "token_logprobs": [None if e["logprob"] is None else finite(e["logprob"]) for e in entries],
        "top_logprobs": [named(e) for e in entries],
        "text_offset": list(starts) if tokenizer is not None else [0] * len(entries),
    }
