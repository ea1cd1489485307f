"""Masks of a round: asked for when its drafts are known, waited for while the device verifies them.

Once the drafts are verified, no slot waits for the mask of another: a slot whose mask is late skips the round, and
takes part again with the same drafts when the mask is ready.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_jax.engine.request import Request

# In the place of a draft that must not be accepted.
NO_DRAFT = -1
# A word of a mask that allows every token.
EVERYTHING = np.uint32(0xFFFFFFFF)
# Seconds that a verified round waits for the first mask, where no slot can go on without one.
WAIT_S = 0.02
# Seconds between two polls of all pending masks.
POLL_S = 0.0005


@dataclass
class _Pending:
    """The masks that a request waits for.

    Attributes:
        drafts: The drafts after which they were asked for.
        masks: The answer, None until it is ready.
    """

    drafts: list[int]
    masks: np.ndarray | None = None


class Masking:
    """The masks of all requests.

    Args:
        words: uint32 words of a mask.
        aligned: Whether blocks begin at multiples of the block size.
        fail: ``fail(request, error)`` ends a request whose mask raises.
    """

    def __init__(self, words: int, aligned: bool, fail: Callable[[Request, Exception], None]):
        self.words, self._aligned, self.fail = words, aligned, fail
        self._pending: dict[Request, _Pending] = {}
        self._room = np.empty((0, words), np.uint32)

    def forget(self, request: Request) -> None:
        """Drops the masks of a request that has ended."""
        self._pending.pop(request, None)

    def is_late(self, request: Request, timeout_s: float = 0.0) -> bool:
        """Whether the masks of a request are still not ready after ``timeout_s`` seconds."""
        pending = self._pending.get(request)
        if pending is None or pending.masks is not None or request.mask is None:
            return False
        try:
            pending.masks = request.mask.answer(timeout_s)
        except Exception as e:
            self.fail(request, e)
            return True
        return pending.masks is None

    def wait(self, requests: Sequence[Request], seconds: float) -> None:
        """Returns when one of the requests has its masks, or after ``seconds``."""
        until = time.monotonic() + seconds
        while all(self.is_late(request) for request in requests) and (left := until - time.monotonic()) > 0:
            self.is_late(requests[0], min(POLL_S, left))

    def ask(self, request: Request, block: list[int]) -> list[int]:
        """Asks for the masks of a request's block.

        Returns:
            The block with the drafts that the masks are for: those asked about before where their masks were late.
        """
        first = self._first_draft(request, len(block))
        if (pending := self._pending.get(request)) is not None:
            return block[:first] + (pending.drafts + [NO_DRAFT] * len(block))[: len(block) - first]
        self._pending[request] = _Pending(block[first:])
        assert request.mask is not None
        request.mask.ask(block[first:])
        return block

    def room(self, slots: int, block_size: int) -> np.ndarray:
        """Memory for the masks of a round, uint32 [slots, block, words], until the next one."""
        if len(self._room) < slots * block_size:
            self._room = np.empty((slots * block_size, self.words), np.uint32)
        return self._room[: slots * block_size].reshape(slots, block_size, self.words)

    def answer(self, request: Request, masks: np.ndarray) -> bool:
        """Writes a request's masks into ``masks`` uint32 [B, words]; False where they are late."""
        pending = self._pending.get(request)
        if pending is None or self.is_late(request) or pending.masks is None:
            return False
        del self._pending[request]
        first = self._first_draft(request, len(masks)) - 1
        count = min(len(pending.masks), len(masks) - first)
        masks[:first] = masks[first + count :] = EVERYTHING
        masks[first : first + count] = pending.masks[:count]
        return True

    def _first_draft(self, request: Request, block_size: int) -> int:
        """The place in a request's block after the last known token."""
        return len(request.tokens) % block_size + 1 if self._aligned else 1


class RoundOfMasks:
    """The masks of one round: `RoundMasks` for `ModelRunner.decode_masked`.

    Args:
        masking: The masks of all requests.
        requests: Those of the batch.
        wait_s: Seconds that the round may wait for a first mask once it is verified.
        meanwhile: Called when the device verifies and the masks are computed.
    """

    def __init__(
        self,
        masking: Masking,
        requests: Sequence[Request],
        wait_s: float = WAIT_S,
        meanwhile: Callable[[], None] = lambda: None,
    ):
        self._masking, self._requests, self._wait_s, self._meanwhile = masking, requests, wait_s, meanwhile

    def ask(self, blocks: np.ndarray) -> np.ndarray:
        """See `RoundMasks`."""
        self._shape, result = blocks.shape, blocks.tolist()
        for i, request in self._masked():
            try:
                result[i] = self._masking.ask(request, result[i])
            except Exception as e:
                self._masking.fail(request, e)
        return np.array(result, blocks.dtype)

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """See `RoundMasks`."""
        for _, request in self._masked()[:1]:
            # Providers that share processes begin with the first look.
            self._masking.is_late(request)
        self._meanwhile()
        masks, late, until = self._masking.room(*self._shape), dict(self._masked()), float("inf")
        unmasked = set(range(len(masks)))
        while True:
            # Read first: masks that are ready by the time the device is done are in time.
            is_done = is_verified()
            # A mask that fails ends its request, here or during the wait.
            late = {i: r for i, r in late.items() if r.finish_reason is None}
            unmasked -= {i for i, r in late.items() if self._masking.answer(r, masks[i])}
            late = {i: r for i, r in late.items() if i in unmasked and r.finish_reason is None}
            if is_done:
                until = min(until, time.monotonic() + self._wait_s)
            is_out = np.array([r.finish_reason is not None or i in late for i, r in enumerate(self._requests)])
            if not late or (is_done and (not is_out.all() or time.monotonic() >= until)):
                masks[list(unmasked)] = EVERYTHING
                return masks, is_out
            self._masking.is_late(next(iter(late.values())), POLL_S)

    def _masked(self):
        return [(i, r) for i, r in enumerate(self._requests) if r.mask is not None and r.finish_reason is None]
