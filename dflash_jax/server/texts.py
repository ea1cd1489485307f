"""Tokenisation on threads beside the event loop.

Text that is too long is refused before it is tokenised. Long texts have their own thread, so that short ones do not
wait for them.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_jax.errors import InputError
from dflash_jax.frontend.prompts import Prompts
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.errors import ApiError, ClientGoneError, too_long

# Least number of characters or token ids of a long prompt.
LONG = 2**16
# Characters that are tokenised at a time where a text is probably too long.
PIECE = 2**16
# Characters of a token, well above the average of texts.
FULL = 8
# Most characters of a text that is truncated: all of it is tokenised in one step, for which other texts wait.
CUT = 2**20
# Most long texts that may wait.
WAITING = 32


T = TypeVar("T")


class Texts:
    """Tokenises for one server."""

    def __init__(self, llm: Prompts, capacity: int):
        """Prepares the threads; ``capacity``: positions of a slot."""
        self._llm, self._tokenizer, self._capacity = llm, llm.tokenizer, capacity
        self._short = ThreadPoolExecutor(2, "short-texts")
        self._long = ThreadPoolExecutor(1, "long-texts")
        self._turns = FairCapacity(1, "the tokenisation of long prompts", WAITING)

    async def prompt(self, prompt: str | Sequence[int], field: str, *, is_truncated: bool = False) -> list[int]:
        """Token ids of a prompt, validated.

        Args:
            prompt: A text or token ids.
            field: The request's field, for errors.
            is_truncated: Whether the prompt is truncated later, and so may be too long now.

        Raises:
            ApiError: It is invalid or too long.
        """
        return await self._run(lambda: self._llm.encode(prompt), prompt, field, is_truncated)

    async def encode(self, text: str, field: str, *, special: bool = False, is_truncated: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: The text.
            field: The request's field, for errors.
            special: Whether to add the tokens that the checkpoint puts around prompts.
            is_truncated: As in `prompt`.

        Raises:
            ApiError: It is invalid or too long.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None, "texts need a tokenizer"
        encode = tokenizer.encode if special else tokenizer.encode_plain
        return await self._run(lambda: encode(text), text, field, is_truncated)

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """Text of token ids, without special tokens."""
        tokenizer = self._tokenizer
        assert tokenizer is not None, "texts need a tokenizer"
        return await self._run(lambda: tokenizer.decode_long(self._llm.encode(ids)) if ids else "", ids, field)

    async def _run(
        self, work: Callable[[], T], given: str | Sequence[int], field: str, is_truncated: bool = False
    ) -> T:
        if is_truncated:
            self._check_cut(given, field)
        else:
            self._check_length(given, field)
        gone = threading.Event()

        def run() -> T:
            if not is_truncated:
                self._check_pieces(given, field, gone)
            if gone.is_set():
                # The request was cancelled: no coroutine receives the exception.
                raise ClientGoneError
            return work()

        try:
            if len(given) <= LONG:
                return await asyncio.get_running_loop().run_in_executor(self._short, run)
            return await self._turns.run(self._long, run)
        except InputError as e:
            raise ApiError(400, str(e), field) from None
        except (TypeError, UnicodeEncodeError):
            raise ApiError(400, f"{field} is not text that UTF-8 can hold", field) from None
        finally:
            gone.set()

    def _check_length(self, prompt: str | Sequence[int], field: str) -> None:
        if not isinstance(prompt, str):
            if len(prompt) > self._capacity:
                raise too_long(len(prompt), self._capacity, field)
        elif self._tokenizer is not None and (longest := self._tokenizer.longest_token) is not None:
            limit = longest * self._capacity
            if len(prompt) > limit:
                raise too_long(-(-len(prompt) // longest), self._capacity, field, is_at_least=True)

    @property
    def most_cut(self) -> int:
        """Most characters of a text that is truncated later."""
        return max(CUT, FULL * self._capacity)

    def _check_cut(self, prompt: str | Sequence[int], field: str) -> None:
        limit = self.most_cut
        if isinstance(prompt, str) and len(prompt) > limit:
            raise ApiError(400, f"{len(prompt)} characters, to be truncated: at most {limit} are possible", field)

    def _check_pieces(self, prompt: str | Sequence[int], field: str, gone: threading.Event) -> None:
        """Refuses a text that is probably too long without tokenising all of it.

        Tokens are counted piece by piece. The cuts change few tokens, so the count is far from double the real one.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or not isinstance(prompt, str) or len(prompt) <= max(LONG, FULL * self._capacity):
            return
        count = 0
        for at in range(0, len(prompt), PIECE):
            if gone.is_set():
                return
            count += len(tokenizer.encode_plain(prompt[at : at + PIECE]))
            if count > 2 * self._capacity:
                raise too_long(count // 2, self._capacity, field, is_at_least=True)
