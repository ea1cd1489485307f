"""What answers have in common: usage, log-probabilities."""

from collections.abc import Sequence
from math import isfinite

from dflash_jax.rows import Row
from dflash_jax.text import Tokenizer

# JSON has no infinity: what OpenAI says for a token that cannot come.
IMPOSSIBLE = -9999.0


def usage(rows: Sequence[Row], choices: int, reasoning_tokens: int = 0, new: Sequence[Row] | None = None) -> dict:
    """Tokens of prompts with so many ``choices`` each, and of what was told of the rows ``new`` (None: of all).

    Drafted tokens that were accepted are OpenAI's accepted_prediction_tokens; draft_rounds is how many blocks were
    drafted.
    """
    prompt = sum(len(r.request.prompt) for r in rows[::choices])
    cached = sum(r.request.cached for r in rows[::choices])
    new = rows if new is None else new
    count = sum(len(r.token_ids) for r in new)
    drafts, drafted = sum(r.drafts for r in new), sum(r.draft_tokens for r in new)
    accepted = sum(n - 1 for r in new for n in r.accepted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "draft_rounds": drafts,
        },
    }


def finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else IMPOSSIBLE


def stop_reasons(row: Row, stop_ids: Sequence[int]) -> dict:
    """Why a text stopped: vLLM's name for the stop string or token that ended it, unless it is one of the checkpoint's
    own ``stop_ids``, and SGLang's."""
    matched = row.matched
    is_own = matched in stop_ids and matched not in row.request.params.stop_token_ids
    return {"stop_reason": None if is_own else matched, "matched_stop": matched}


def token_text(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int]]:
    """A token as text, and its bytes."""
    if tokenizer is None:
        return f"token_id:{token_id}", []
    raw = tokenizer.token_bytes(token_id)
    return raw.decode(errors="replace"), list(raw)


def prompt_entry(tokenizer: Tokenizer | None, entry: dict) -> dict:
    """vLLM's shape for a token of the prompt: of the token itself and the likeliest ones."""
    values = {entry["token_id"]: entry["logprob"]} | entry["top"]
    ranks = {t: i + 1 for i, t in enumerate(entry["top"])}
    return {
        str(t): {"logprob": finite(v), "rank": ranks.get(t), "decoded_token": token_text(tokenizer, t)[0]}
        for t, v in values.items()
    }


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[dict]) -> list[dict]:
    """OpenAI's shape for chats."""

    def one(token_id: int, logprob: float) -> dict:
        text, raw = token_text(tokenizer, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    return [
        one(e["token_id"], e["logprob"]) | {"top_logprobs": [one(t, v) for t, v in e["top"].items()]} for e in entries
    ]


def completion_logprobs(tokenizer: Tokenizer | None, entries: Sequence[dict | None], offset: int, top: bool) -> dict:
    """OpenAI's older shape, for completions; a None stands for the first token of a prompt, before which nothing
    is."""
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None, "text_offset": []}
    for e in entries:
        text, _ = token_text(tokenizer, e["token_id"])
        is_first = e["logprob"] is None
        found["tokens"].append(text)
        found["token_logprobs"].append(None if is_first else finite(e["logprob"]))
        if top:
            named = {token_text(tokenizer, t)[0]: finite(v) for t, v in e["top"].items()}
            found["top_logprobs"].append(None if is_first else named)
        found["text_offset"].append(offset)
        offset += len(text)
    return found
