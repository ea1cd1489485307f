"""Who answers: our engine in this process, or any server that speaks OpenAI's chat completions."""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from dflash_jax.errors import InputError


@dataclass
class Answer:
    """``times``: seconds since the question at which tokens came, and how many. rounds: of the decoding; None where the
    server does not say."""

    text: str = ""
    tokens: int = 0
    rounds: int | None = None
    seconds: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.times[0][0] if self.times else self.seconds

    @property
    def between_s(self) -> float | None:
        """Mean time between tokens behind those that came first."""
        later = self.tokens - (self.times[0][1] if self.times else self.tokens)
        return (self.seconds - self.first_token_s) / later if later > 0 else None


@dataclass(frozen=True)
class Asking:
    """How every question is asked. thinking: None leaves it to the template."""

    max_new_tokens: int = 4096
    temperature: float = 0.0
    thinking: bool | None = True
    ignore_eos: bool = False
    timeout_s: float = 3600.0


class Client(Protocol):
    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer: ...

    async def counters(self) -> tuple[float, float] | None:
        """(rounds, tokens that they accepted) since the server's start, for answers that do not say."""

    async def acceptance(self) -> float | None:
        """The acceptance length that the server itself states, where it has no counters."""

    async def forget(self) -> None:
        """No prompt is known any more."""


class EngineClient:
    """``async with EngineClient(llm, block_size, slots, capacity)``; block size 1 leaves the drafter out."""

    def __init__(self, llm, block_size: int | str, slots: int, capacity: int):
        from dflash_jax.engine.service import AsyncEngine
        from dflash_jax.engine.warm_up import warm_up

        self.llm, self.block_size = llm, block_size
        engine = llm.new_engine(llm.plain_programs if block_size == 1 else llm.programs, slots, capacity)
        warm_up(engine)
        # The template's library takes seconds to import: not the first question's.
        llm.encode_chat([{"role": "user", "content": "?"}])
        self.running = AsyncEngine(engine)

    async def __aenter__(self) -> "EngineClient":
        await self.running.__aenter__()
        return self

    async def __aexit__(self, *error) -> None:
        await self.running.__aexit__(*error)

    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer:
        from dflash_jax.sampling_params import SamplingParams

        prompt = self.llm.encode_chat(list(messages), asking.thinking)
        room = self.running.engine.runner.capacity - len(prompt)
        if room < 1:
            raise InputError(f"a prompt has {len(prompt)} tokens: there is room for {room + len(prompt) - 1}")
        most = min(asking.max_new_tokens, room)
        params = SamplingParams(temperature=asking.temperature, max_tokens=most, seed=0, ignore_eos=asking.ignore_eos)
        row, found, began = self.llm.new_sequence(prompt, params, self.block_size), Answer(), time.perf_counter()
        async for event in self.running.submit(row.request):
            row.take(event)
            if event.tokens:
                found.times.append((time.perf_counter() - began, len(event.tokens)))
        found.seconds = time.perf_counter() - began
        row.raise_failure()
        done = row.completion()
        found.text, found.tokens, found.rounds = done.text, len(done.token_ids), len(done.acceptance_lengths)
        return found

    async def counters(self) -> None:
        return None

    async def acceptance(self) -> None:
        return None

    async def forget(self) -> None:
        """There is no store of prompts."""


class HttpClient:
    """``async with HttpClient(url)``. ``block_size``, which our server understands, is asked for unless it is None."""

    def __init__(self, url: str, model: str | None = None, key: str = "EMPTY", block_size: int | str | None = None):
        try:
            import httpx
        except ImportError:
            raise InputError('--url needs httpx: pip install "dflash-jax[server]"') from None
        base = url.rstrip("/").removesuffix("/v1")
        if not re.match(r"https?://[^/]", base):
            raise InputError(f"url {url}: it must be like http://127.0.0.1:30000")
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=base, limits=limits, headers=headers, timeout=30)
        self.url, self.model, self.block_size, self._errors = url, model, block_size, httpx.HTTPError

    async def __aenter__(self) -> "HttpClient":
        try:
            found = await self._http.get("/v1/models")
            found.raise_for_status()
            self.model = self.model or found.json()["data"][0]["id"]
        except (self._errors, ValueError, LookupError, TypeError) as e:
            raise InputError(f"{self.url} does not answer /v1/models: {_words(e)}") from None
        return self

    async def __aexit__(self, *error) -> None:
        await self._http.aclose()

    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer:
        body = {"model": self.model, "messages": list(messages), "max_tokens": asking.max_new_tokens}
        body |= {"temperature": asking.temperature, "stream": True, "stream_options": {"include_usage": True}}
        if asking.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asking.thinking}
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if self.block_size is not None:
            body["block_size"] = self.block_size
        found, usage, began = Answer(), None, time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body, timeout=asking.timeout_s) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    raise InputError(f"{self.url}: {reply.status_code}: {' '.join(text.split())[:200]}")
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    piece = json.loads(line[6:])
                    if error := piece.get("error"):
                        words = error.get("message", error) if isinstance(error, dict) else error
                        raise InputError(f"{self.url}: {' '.join(str(words).split())[:200]}")
                    usage = piece.get("usage") or usage
                    for choice in piece.get("choices") or ():
                        delta = choice.get("delta") or {}
                        if text := delta.get("content") or "":
                            found.text += text
                        if text or delta.get("reasoning_content") or delta.get("reasoning"):
                            found.times.append((time.perf_counter() - began, 1))
        except self._errors as e:
            raise InputError(f"{self.url}: {_words(e)}") from None
        except InputError:
            raise
        except ValueError:
            raise InputError(f"{self.url}: a piece of the answer is not JSON") from None
        found.seconds = time.perf_counter() - began
        if not usage or usage.get("completion_tokens") is None:
            raise InputError(f"{self.url} gives no usage: tokens cannot be counted")
        found.tokens, details = usage["completion_tokens"], usage.get("completion_tokens_details") or {}
        if "draft_rounds" in details:
            # A token that no draft brought is a round of its own.
            found.rounds = found.tokens - (details.get("accepted_prediction_tokens") or 0)
        elif self.block_size not in (None, 1):
            raise InputError(f"{self.url} does not say its rounds, so it may know no block_size: give --label")
        return found

    async def counters(self) -> tuple[float, float] | None:
        try:
            text = (await self._http.get("/metrics")).text
        except self._errors:
            return None
        rounds, accepted = (_sum(text, f"spec_decode_num_{name}(?:_total)?") for name in ("drafts", "accepted_tokens"))
        return None if rounds is None or accepted is None else (rounds, accepted)

    async def acceptance(self) -> float | None:
        """SGLang's gauge: of its last rounds."""
        try:
            found = _values((await self._http.get("/metrics")).text, "spec_accept_length")
        except self._errors:
            return None
        # One of each rank.
        return sum(found) / len(found) if found and sum(found) else None

    async def forget(self) -> None:
        """By SGLang's endpoint, or vLLM's; whoever has neither keeps what it knows."""
        for path in ("/flush_cache", "/reset_prefix_cache"):
            with suppress(self._errors):
                await self._http.post(path)


def _values(metrics: str, name: str) -> list[float]:
    return list(map(float, re.findall(rf"^\w+:{name}(?:\{{[^}}]*\}})? (\S+)$", metrics, re.M)))


def _sum(metrics: str, name: str) -> float | None:
    found = _values(metrics, name)
    return sum(found) if found else None


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
