"""A target behind servers: what `regenerate` needs of an `LLM`, by URL."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.concurrency import gather_or_cancel
from dflash_jax.frontend.servers import RequestLostError, Servers
from dflash_jax.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteAnswer:
    """The continuation of a prompt.

    Attributes:
        token_ids: The new tokens, with the stop token where one ended the text.
        text: Their text.
    """

    token_ids: list[int]
    text: str


class RemoteTarget:
    """Several servers of one target, as ``with RemoteTarget(urls, 32) as target``.

    They tokenise prompts, too (``/tokenize``), so that neither weights nor tokenizer are here. Requests for tokens are
    ``/v1/completions`` of token ids, with ``return_token_ids``: those of our server and of vLLM.

    Args:
        urls: Their addresses.
        concurrency: Prompts that each continues at a time.
        key: The API key of all.

    Attributes:
        model: The name of the model that all of them serve.
        max_len: Positions of a request, of the server that has the fewest.
        slots: Prompts that are continued at a time.
        media: None: images and videos are not sent.
    """

    media = None

    def __init__(self, urls: Sequence[str], concurrency: int, key: str = "EMPTY"):
        self._urls, self._concurrency, self._key = urls, concurrency, key
        self.slots = concurrency * len(urls)

    def __enter__(self) -> "RemoteTarget":
        """Connects to the servers. Raises InputError where none answers, or where their models differ."""
        with ExitStack() as stack:
            self._runner = stack.enter_context(asyncio.Runner())
            self._servers = self._run(_opened(self._urls, self._concurrency, self._key))
            stack.callback(lambda: self._run(self._servers.__aexit__()))
            models = self._run(self._servers.get("/v1/models"))
            try:
                cards = [(url, _json(url, response)["data"][0]) for url, response in models]
                self.model, self.max_len = cards[0][1]["id"], min(card["max_model_len"] for _, card in cards)
            except (LookupError, TypeError):
                raise InputError("/v1/models of a server has no model with id and max_model_len") from None
            if other := next((f"{url} has {card['id']}" for url, card in cards if card["id"] != self.model), None):
                raise InputError(f"the servers have different models: {cards[0][0]} has {self.model}, {other}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a text. Raises InputError where the servers refuse it."""
        return self._run(self._tokens({"prompt": prompt}))

    def encode_chat(
        self, messages: list[dict], thinking: bool | None = None, tools: list[dict] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the servers' chat template. Raises InputError where they refuse it."""
        options = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        options |= {"tools": tools} if tools else {}
        return self._run(self._tokens({"messages": messages, **options}))

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], progress: bool = False
    ) -> list[RemoteAnswer]:
        """Continues every prompt.

        Args:
            prompts: Token ids of each.
            params: How each is continued.
            progress: As in `LLM.generate`; there is no bar.

        Raises:
            InputError: A server refuses a prompt.
            EngineError: A prompt got no answer.
        """
        return self._run(self._generate(prompts, params))

    async def _generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RemoteAnswer]:
        answers, todo = dict[int, RemoteAnswer](), enumerate(zip(prompts, params, strict=True))

        async def work() -> None:
            for index, (ids, each) in todo:
                answers[index] = await self._answer(ids, each)

        await gather_or_cancel(work() for _ in range(min(self.slots, len(prompts))))
        return [answers[index] for index in range(len(prompts))]

    async def _answer(self, ids: list[int], params: SamplingParams) -> RemoteAnswer:
        # What has no value here has the checkpoint's, or none. The endpoint's own default of max_tokens is another one.
        default = asdict(SamplingParams())
        options = {k: v for k, v in asdict(params).items() if k == "max_tokens" or v != default[k]}
        value = await self._post("/v1/completions", {"prompt": ids, "return_token_ids": True, **options})
        try:
            (choice,) = value["choices"]
            tokens, text = choice["token_ids"], choice["text"]
        except (LookupError, TypeError, ValueError):
            tokens = text = None
        if not isinstance(tokens, list) or not isinstance(text, str):
            raise InputError("a server's completion has no token_ids, for which return_token_ids asks")
        return RemoteAnswer(tokens, text)

    async def _tokens(self, body: dict) -> list[int]:
        value = await self._post("/tokenize", body)
        if not isinstance(value, dict) or not isinstance(tokens := value.get("tokens"), list):
            raise InputError("a server's answer to /tokenize has no tokens")
        return tokens

    async def _post(self, path: str, body: dict) -> Any:
        try:
            response = await self._servers.post(path, json.dumps({"model": self.model, **body}).encode("ascii"))
        except RequestLostError as e:
            raise EngineError(f"a prompt has no answer: {e}") from None
        return _json(path, response)


async def _opened(urls: Sequence[str], concurrency: int, key: str) -> Servers:
    return await Servers(urls, concurrency, key).__aenter__()


def _json(name: str, response) -> Any:
    """The JSON of a good answer. Raises InputError for another one."""
    try:
        value = response.json()
    except (ValueError, RecursionError):
        raise InputError(f"{name}: {response.status_code}, not JSON: {response.text[:200]!r}") from None
    if response.status_code != 200:
        error = value.get("error", value) if isinstance(value, dict) else value
        message = error.get("message", error) if isinstance(error, dict) else error
        raise InputError(f"{name}: {response.status_code}: {' '.join(str(message).split())[:300]}")
    return value
