"""Makes two runs of a request equal, so that another server can continue a stream that was cut.

A cluster's ingress gives a request a key. Ids and seeds that the request lacks follow from the key. While a stream
runs, each piece of its text is recorded in the stream, in a comment after the piece's events. When the server dies,
the ingress sends the same request to another server, with the recorded pieces. That server passes the pieces through
the text, stop strings, tools and the grammar, writes their events again, and then a comment, up to which the ingress
drops the events. The engine goes on after the recorded tokens.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random, SystemRandom

from dflash_jax.frontend.sequence import Piece, TextSequence

# Comments of a recorded stream. RECORD precedes JSON: the events before it belong to a piece that is complete.
# REPLAYED: the events before it repeat those of an earlier run. LOST: the engine fails, and an error event follows.
RECORD, REPLAYED, LOST, END = b": record ", b": replayed\n\n", b": lost\n\n", b"\n\n"


def recorded(index: int, sequence: TextSequence, piece: Piece) -> bytes:
    """A piece of the sequence ``index`` of a request as one line of JSON, for `Run.replayed`."""
    fields = [index, piece.token_ids, piece.acceptance_lengths, sequence.drafts, sequence.draft_tokens]
    logprobs = piece.logprobs and [_plain(entry) for entry in piece.logprobs]
    return json.dumps([*fields, piece.finish_reason, logprobs], separators=(",", ":")).encode("ascii")


def _plain(entry: dict) -> dict:
    """An entry of log-probabilities with lists in place of dicts, whose keys JSON would make strings."""
    return {name: list(value.items()) if isinstance(value, dict) else value for name, value in entry.items()}


def _entry(plain: dict) -> dict:
    return {name: dict(value) if isinstance(value, list) else value for name, value in plain.items()}


class Run:
    """One run of a request.

    Args:
        key: What ids and seeds follow from; None for random ones, and for no record of the stream.
        created: When the request came, in seconds since the epoch; None: now.
        lines: The recorded pieces of earlier runs.

    Attributes:
        key: The key; None for a run that is not recorded.
        created: When the request came, in seconds since the epoch.
        random: The source of ids and seeds.
    """

    def __init__(self, key: str | None = None, created: int | None = None, lines: Sequence[bytes] = ()):
        self.created = int(time.time()) if created is None else created
        self.random: Random = SystemRandom() if key is None else Random(key)
        self.key, self._lines = key, lines
        self._send: Callable[[dict], Awaitable[None]] | None = None

    def fresh_id(self) -> str:
        """128 bits in hexadecimal."""
        return f"{self.random.getrandbits(128):032x}"

    def fresh_seed(self) -> int:
        """A seed below 2³², for a request without one."""
        return self.random.getrandbits(32)

    def record_in(self, send: Callable[[dict], Awaitable[None]]) -> None:
        """Records the run in the stream that ``send`` sends, if it is recorded at all."""
        if self.key is not None:
            self._send = send

    async def _write(self, comment: bytes) -> None:
        if self._send is not None:
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    def replayed(self, sequences: Sequence[TextSequence]) -> Iterator[tuple[int, Piece]]:
        """Yields (index, piece) of the earlier runs' pieces, which the sequences have taken then."""
        for line in self._lines:
            index, token_ids, lengths, drafts, draft_tokens, reason, logprobs = json.loads(line)
            logprobs = logprobs and [_entry(entry) for entry in logprobs]
            piece = Piece("", token_ids, lengths, logprobs=logprobs, finish_reason=reason)
            yield index, sequences[index].replay(piece, drafts, draft_tokens)

    def ended(self) -> set[int]:
        """The sequences that ended in earlier runs."""
        lines = map(json.loads, self._lines)
        return {index for index, _, _, _, _, reason, _ in lines if reason is not None}

    async def end_replay(self) -> None:
        """Records that the events of all `replayed` pieces are sent."""
        if self._lines:
            await self._write(REPLAYED)

    async def record(self, index: int, sequence: TextSequence, piece: Piece) -> None:
        """Records a piece whose events are sent."""
        if self._send is not None:
            await self._write(RECORD + recorded(index, sequence, piece) + END)

    async def lose(self) -> None:
        """Records that the engine has failed, so that another server may go on."""
        await self._write(LOST)
