"""Masks of a round: asked for when its drafts are known, waited for while the device verifies them.

Once the drafts are verified, no slot waits for another one's mask: a slot whose mask is late sits the round out, and
takes part again, with the same drafts, when the mask is there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_jax.engine.request import Request

# In place of a draft where none may be accepted.
NO_DRAFT = -1
# Seconds that a verified round waits for the first mask, where no slot can go on without one.
WAIT_S = 0.02
# Seconds between two looks at all masks that are waited for.
LOOK_S = 0.0005


@dataclass
class _Pending:
    """What a request has asked its mask for. ``masks``: the answer, None until it is there."""

    drafts: list[int]
    masks: np.ndarray | None = None


class Masking:
    """The masks of all requests.

    ``fail(request, error)`` ends a request whose mask raises.
    """

    def __init__(self, words: int, aligned: bool, fail: Callable[[Request, Exception], None]):
        self.words, self._aligned, self.fail = words, aligned, fail
        self._pending: dict[Request, _Pending] = {}

    def forget(self, request: Request) -> None:
        """A request that has ended."""
        self._pending.pop(request, None)

    def is_late(self, request: Request, timeout_s: float = 0.0) -> bool:
        """Whether a request waits for masks, which may take ``timeout_s`` more."""
        pending = self._pending.get(request)
        if pending is None or pending.masks is not None:
            return False
        try:
            pending.masks = request.mask.answer(timeout_s)
        except Exception as e:
            self.fail(request, e)
            return True
        return pending.masks is None

    def wait(self, requests: Sequence[Request], seconds: float) -> None:
        """Returns when one of the requests waits for no mask any more, or after so many seconds."""
        until = time.monotonic() + seconds
        while all(self.is_late(request) for request in requests) and (left := until - time.monotonic()) > 0:
            self.is_late(requests[0], min(LOOK_S, left))

    def ask(self, request: Request, window: np.ndarray) -> np.ndarray:
        """Asks for the masks of a request's window int [W], and returns the window with the drafts that they are for:
        those that were asked about before, where their masks came late."""
        first = self._first_draft(request, len(window))
        pending = self._pending.get(request)
        if pending is None:
            pending = self._pending[request] = _Pending(window[first:].tolist())
            request.mask.ask(pending.drafts)
        drafts = (pending.drafts + [NO_DRAFT] * len(window))[: len(window) - first]
        return np.concatenate([window[:first], np.array(drafts, window.dtype)])

    def answer(self, request: Request, masks: np.ndarray, timeout_s: float) -> bool:
        """Writes a request's masks into ``masks`` [W, words], and says whether they are there in time."""
        if request not in self._pending or self.is_late(request, timeout_s):
            return False
        pending, first = self._pending.pop(request), self._first_draft(request, len(masks)) - 1
        count = min(len(pending.masks), len(masks) - first)
        masks[first : first + count] = pending.masks[:count]
        return True

    def _first_draft(self, request: Request, window: int) -> int:
        """The place in a request's window behind the last known token."""
        return len(request.tokens) % window + 1 if self._aligned else 1


class RoundOfMasks:
    """The masks of one round; what `Device.decode_masked` asks.

    ``wait_s``: seconds that the round may wait for a first mask once it is verified.
    """

    def __init__(self, masking: Masking, requests: Sequence[Request], wait_s: float = WAIT_S):
        self._masking, self._requests, self._wait_s = masking, requests, wait_s

    def ask(self, block: np.ndarray) -> np.ndarray:
        self._shape = block.shape
        windows = [block[i] for i in range(len(block))]
        for i, request in self._masked():
            try:
                windows[i] = self._masking.ask(request, block[i])
            except Exception as e:
                self._masking.fail(request, e)
        return np.stack(windows)

    def answer(self, is_verified: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        masks = np.full((*self._shape, self._masking.words), 0xFFFFFFFF, np.uint32)
        late, until = dict(self._masked()), None
        while True:
            # Asked first: masks that come until the device is done are in time.
            is_done = is_verified()
            # A mask that fails ends its request, here or while it is waited for.
            late = {i: r for i, r in late.items() if r.finish_reason is None}
            late = {i: r for i, r in late.items() if not self._masking.answer(r, masks[i], 0.0)}
            late = {i: r for i, r in late.items() if r.finish_reason is None}
            is_out = np.array([r.finish_reason is not None or i in late for i, r in enumerate(self._requests)])
            if is_done and until is None:
                until = time.monotonic() + self._wait_s
            if not late or (is_done and (not is_out.all() or time.monotonic() >= until)):
                return masks, is_out
            self._masking.wait(list(late.values()), LOOK_S)

    def _masked(self):
        return [(i, r) for i, r in enumerate(self._requests) if r.mask is not None and r.finish_reason is None]
