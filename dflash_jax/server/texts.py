"""Text into token ids and back, beside the event loop.

What is too long is refused before it is tokenised. Long texts have a thread of their own, so that short ones do not
wait behind them.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.server.errors import ApiError, TooLongError

# Characters, or token ids, from which on a prompt is long.
LONG = 2**16
# Characters that are tokenised at a time where it is likely that a text is too long.
PIECE = 2**16
# More characters for each token than texts have on average.
FULL = 8
# Characters of a text that is cut to fewer tokens: all of it is tokenised, in one step, which others wait for.
CUT = 2**20
# Long texts that may wait.
WAITING = 32


class Texts:
    """Tokenises for one server. ``capacity``: positions of a slot."""

    def __init__(self, llm: LLM, capacity: int):
        self._llm, self._tokenizer, self._capacity = llm, llm.tokenizer, capacity
        self._short = ThreadPoolExecutor(2, "short-texts")
        self._long = ThreadPoolExecutor(1, "long-texts")
        self._waiting = 0

    async def prompt(self, prompt: str | Sequence[int], field: str, *, is_truncated: bool = False) -> list[int]:
        """Checked token ids of a prompt, which is a text or token ids. ``is_truncated``: it is cut later, and may be
        too long. Raises ApiError, which names ``field``."""
        return await self._run(lambda: self._llm.encode(prompt), prompt, field, is_truncated)

    async def encode(self, text: str, field: str, *, special: bool = False, is_truncated: bool = False) -> list[int]:
        """Token ids of a text; if ``special``, with the tokens that the checkpoint puts around prompts."""
        encode = self._tokenizer.encode if special else self._tokenizer.encode_plain
        return await self._run(lambda: encode(text), text, field, is_truncated)

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """Text without special tokens."""
        return await self._run(lambda: self._tokenizer.decode_long(self._llm.encode(ids)) if ids else "", ids, field)

    async def _run(self, work: Callable, given: str | Sequence[int], field: str, is_truncated: bool = False):
        if is_truncated:
            self._check_cut(given, field)
        else:
            self._check_length(given, field)
        is_long = len(given) > LONG
        if is_long and self._waiting >= WAITING:
            raise ApiError(503, f"{self._waiting} long prompts wait to be tokenised: try again later")
        self._waiting += is_long
        gone = threading.Event()

        def run():
            if not is_truncated:
                self._check_pieces(given, field, gone)
            return None if gone.is_set() else work()

        try:
            executor = self._long if is_long else self._short
            return await asyncio.get_running_loop().run_in_executor(executor, run)
        except InputError as e:
            raise ApiError(400, str(e), field) from None
        except (TypeError, UnicodeEncodeError):
            raise ApiError(400, f"{field} is not text that UTF-8 can hold", field) from None
        finally:
            gone.set()
            self._waiting -= is_long

    def _check_length(self, given: str | Sequence[int], field: str) -> None:
        if not isinstance(given, str):
            if len(given) > self._capacity:
                raise TooLongError(f"{len(given)} tokens do not fit: at most {self._capacity} tokens do", field)
        elif self._tokenizer is not None and (longest := self._tokenizer.longest_token) is not None:
            most = longest * self._capacity
            if len(given) > most:
                message = f"{len(given)} characters do not fit: at most {self._capacity} tokens do, {most} characters"
                raise TooLongError(message, field)

    @property
    def most_cut(self) -> int:
        """Characters that a text may have which is cut later."""
        return max(CUT, FULL * self._capacity)

    def _check_cut(self, given: str | Sequence[int], field: str) -> None:
        most = self.most_cut
        if isinstance(given, str) and len(given) > most:
            raise ApiError(400, f"{len(given)} characters, to be truncated: at most {most} are possible", field)

    def _check_pieces(self, given: str | Sequence[int], field: str, gone: threading.Event) -> None:
        """Counts the tokens of a text that is probably too long piece by piece, so that it need not be read to its
        end. Cutting a text changes tokens only where it is cut, which is far from doubling them."""
        if not isinstance(given, str) or len(given) <= max(LONG, FULL * self._capacity):
            return
        count = 0
        for at in range(0, len(given), PIECE):
            if gone.is_set():
                return
            count += len(self._tokenizer.encode_plain(given[at : at + PIECE]))
            if count > 2 * self._capacity:
                raise TooLongError(f"more than {count} tokens do not fit: at most {self._capacity} tokens do", field)
