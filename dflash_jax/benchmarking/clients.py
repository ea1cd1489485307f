"""Clients of a benchmark: our engine in this process, or any server with OpenAI's chat completions."""

import json
import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dflash_jax.engine.config import BlockSize
from dflash_jax.errors import InputError

SIDES = ("drafted", "accepted")
# Numbers of drafts by drafter, one of `SIDES`, and place in the block.
Drafts = Counter[tuple[str, str, int]]


@dataclass
class Answer:
    """An answer and its timing.

    Attributes:
        text: The text.
        tokens: New tokens.
        rounds: Rounds of decoding; None where the server does not report them.
        seconds: From the question to the end.
        times: (seconds since the question, number of tokens) of each event.
        drafts: Drafts of the rounds.
    """

    text: str = ""
    tokens: int = 0
    rounds: int | None = None
    seconds: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Counter)

    @property
    def first_token_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0][0] if self.times else self.seconds

    @property
    def between_s(self) -> float | None:
        """Mean seconds between tokens after the first event; None without such tokens."""
        later = self.tokens - (self.times[0][1] if self.times else self.tokens)
        return (self.seconds - self.first_token_s) / later if later > 0 else None


class Counters(NamedTuple):
    """What a server has counted since its start.

    Attributes:
        rounds: Rounds with drafts.
        accepted: Drafts that were accepted.
        drafts: The drafts; each round counts as one at every place.
    """

    rounds: float
    accepted: float
    drafts: Drafts


@dataclass(frozen=True)
class Asking:
    """How every question is asked.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        temperature: Of sampling.
        thinking: Whether the template opens a thought; None leaves it to the template.
        ignore_eos: Whether answers have max_new_tokens tokens.
        timeout_s: Seconds for an answer.
    """

    max_new_tokens: int = 4096
    temperature: float = 0.0
    thinking: bool | None = True
    ignore_eos: bool = False
    timeout_s: float = 3600.0


class Client(Protocol):
    """What a benchmark needs of a client."""

    @abstractmethod
    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer:
        """Asks for the answer to a conversation."""

    @abstractmethod
    async def counters(self) -> Counters | None:
        """The server's counters, for answers without rounds."""

    @abstractmethod
    async def acceptance(self) -> float | None:
        """The acceptance length that a server without counters states."""

    @abstractmethod
    async def forget(self) -> None:
        """Empties the prefix cache."""


class EngineClient:
    """Our engine, as ``async with EngineClient(llm, block_size, slots, capacity)``. Block size 1 omits the drafter.

    Attributes:
        llm: The pair.
        block_size: Of every request.
        running: The engine.
    """

    def __init__(self, llm, block_size: BlockSize, slots: int, capacity: int):
        from dflash_jax.engine.service import AsyncEngine
        from dflash_jax.engine.warm_up import warm_up

        self.llm, self.block_size = llm, block_size
        engine = llm.new_engine(llm.plain_programs if block_size == 1 else llm.programs, slots, capacity)
        warm_up(engine)
        # Imports the template's library, which takes seconds, before the first question.
        llm.encode_chat([{"role": "user", "content": "?"}])
        self.running = AsyncEngine(engine)

    async def __aenter__(self) -> "EngineClient":
        await self.running.__aenter__()
        return self

    async def __aexit__(self, *error) -> None:
        await self.running.__aexit__(*error)

    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer:
        """See `Client.answer`.

        Raises:
            InputError: The prompt leaves no room.
        """
        from dflash_jax.sampling_params import SamplingParams

        prompt = self.llm.encode_chat(list(messages), asking.thinking)
        room = self.running.engine.runner.capacity - len(prompt)
        if room < 1:
            raise InputError(f"a prompt has {len(prompt)} tokens: there is room for {room + len(prompt) - 1}")
        most = min(asking.max_new_tokens, room)
        params = SamplingParams(temperature=asking.temperature, max_tokens=most, seed=0, ignore_eos=asking.ignore_eos)
        row, answer, start = self.llm.new_sequence(prompt, params, self.block_size), Answer(), time.perf_counter()
        async for event in self.running.submit(row.request):
            row.take(event)
            if event.tokens:
                answer.times.append((time.perf_counter() - start, len(event.tokens)))
        answer.seconds = time.perf_counter() - start
        row.raise_failure()
        answer.text, answer.tokens, answer.rounds = row.completion().text, row.num_tokens, len(row.yielded)
        for name, rounds in row.rounds.by_drafter().items():
            for side, counts in zip(SIDES, rounds.by_place(), strict=True):
                answer.drafts.update({(name, side, place): count for place, count in enumerate(counts)})
        return answer

    async def counters(self) -> None:
        """None: answers have rounds."""

    async def acceptance(self) -> None:
        """None: answers have rounds."""

    async def forget(self) -> None:
        """Does nothing: this engine has no prefix cache."""


class HttpClient:
    """A server, as ``async with HttpClient(url)``.

    Attributes:
        url: The server.
        model: The model's name; None: the first that the server lists.
        block_size: A field that our server reads; None omits it.
    """

    def __init__(self, url: str, model: str | None = None, key: str = "EMPTY", block_size: BlockSize | None = None):
        """Prepares the connection.

        Raises:
            InputError: httpx is missing, or the URL is invalid.
        """
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
            response = await self._http.get("/v1/models")
            response.raise_for_status()
            self.model = self.model or response.json()["data"][0]["id"]
        except (self._errors, ValueError, LookupError, TypeError) as e:
            raise InputError(f"{self.url} does not answer /v1/models: {_words(e)}") from None
        return self

    async def __aexit__(self, *error) -> None:
        await self._http.aclose()

    async def answer(self, messages: Sequence[dict], asking: Asking) -> Answer:
        """See `Client.answer`.

        Raises:
            InputError: The server fails, or does not report tokens or rounds.
        """
        body = {"model": self.model, "messages": list(messages), "max_tokens": asking.max_new_tokens}
        body |= {"temperature": asking.temperature, "stream": True, "stream_options": {"include_usage": True}}
        if asking.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asking.thinking}
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if self.block_size is not None:
            body["block_size"] = self.block_size
        answer, usage, start = Answer(), None, time.perf_counter()
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
                            answer.text += text
                        if text or delta.get("reasoning_content") or delta.get("reasoning"):
                            answer.times.append((time.perf_counter() - start, 1))
        except self._errors as e:
            raise InputError(f"{self.url}: {_words(e)}") from None
        except InputError:
            raise
        except ValueError:
            raise InputError(f"{self.url}: a piece of the answer is not JSON") from None
        answer.seconds = time.perf_counter() - start
        if not usage or usage.get("completion_tokens") is None:
            raise InputError(f"{self.url} gives no usage: tokens cannot be counted")
        answer.tokens, details = usage["completion_tokens"], usage.get("completion_tokens_details") or {}
        if "draft_rounds" in details:
            # Every round yields one token that was not drafted.
            answer.rounds = answer.tokens - (details.get("accepted_prediction_tokens") or 0)
            for name, counts in (usage.get("drafters") or {}).items():
                for side in SIDES:
                    places = counts[f"{side}_per_pos"].items()
                    answer.drafts.update({(name, side, int(place)): count for place, count in places})
        elif self.block_size not in (None, 1):
            raise InputError(f"{self.url} does not say its rounds, so it may know no block_size: give --label")
        return answer

    async def counters(self) -> Counters | None:
        """Reads the counters of vLLM, llama.cpp and our server from /metrics."""
        samples, names = await self._samples(), ("drafts", "accepted_tokens", "accepted_tokens_per_pos")
        rounds, accepted, by_place = ([*_named(samples, f"spec_decode_num_{name}")] for name in names)
        if not rounds or not accepted:
            return None
        drafts, count = Counter(), sum(each.value for each in rounds)
        for each in by_place:
            place = int(each.labels["position"])
            drafts["", "accepted", place] += each.value
            drafts["", "drafted", place] = count
        return Counters(count, sum(each.value for each in accepted), drafts)

    async def acceptance(self) -> float | None:
        """Reads SGLang's gauge, which covers its last rounds, as the mean over ranks."""
        values = [each.value for each in _named(await self._samples(), "spec_accept_length")]
        return sum(values) / len(values) if values and sum(values) else None

    async def _samples(self) -> list:
        """The samples of /metrics; none where these cannot be read."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            families = [*text_string_to_metric_families((await self._http.get("/metrics")).text)]
        except (self._errors, ValueError):
            return []
        return [sample for family in families for sample in family.samples]

    async def forget(self) -> None:
        """Empties the prefix cache by SGLang's or vLLM's endpoint; a server without either keeps it."""
        for path in ("/flush_cache", "/reset_prefix_cache"):
            with suppress(self._errors):
                await self._http.post(path)


def _named(samples: Sequence, name: str) -> Iterator:
    """Yields the samples of a metric, whatever its prefix."""
    return (each for each in samples if each.name.partition(":")[2].removesuffix("_total") == name)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
