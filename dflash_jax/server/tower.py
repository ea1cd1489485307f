"""The vision tower of a server, which all clients share by turns."""

import asyncio
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor

from dflash_jax.engine.ahead_of_time import yield_processors
from dflash_jax.engine.media import PromptMedia
from dflash_jax.engine.vision_encoder import VisionEncoder
from dflash_jax.server.capacity import FairCapacity, Share

# Bytes of the rows of images and videos.
MOST_BYTES = 2**31


class TowerTurns:
    """Runs the vision tower on one thread: the engine's loop never waits for it, and clients share its steps by turns.

    Attributes:
        encoder: The tower.
        memory: Bytes of rows.
    """

    def __init__(self, encoder: VisionEncoder, most_bytes: int = MOST_BYTES):
        self.encoder, self.memory = encoder, FairCapacity(most_bytes, "the memory for rows of images and videos")
        self._row_bytes = encoder.config.out_hidden_size * encoder.tower.dtype.itemsize
        self._turns = FairCapacity(1, "the vision tower")
        self._thread = ThreadPoolExecutor(1, "vision-tower")

    def compile(self, positions: int) -> None:
        """Compiles the tower's programs for prompts of ``positions`` tokens; requests have precedence."""
        yield_processors()
        for size in self.encoder.sizes_for(positions):
            self.encoder.compile(size)

    async def encode(self, client: Hashable, media: PromptMedia) -> Share:
        """Computes the rows of a prompt's media. Images of several requests take turns.

        Args:
            client: Whose request it is.
            media: As of `VisionEncoder.prompt_media`.

        Returns:
            The memory of the rows, to be released when the request ends.

        Raises:
            ApiError: There is no memory for the rows.
        """
        share = self.memory.take_now(self._row_bytes * sum(span.length for span in media.spans), client)
        try:
            for span in media.spans:
                if span.is_encoded():
                    await asyncio.to_thread(span.rows)
                else:
                    await self._turns.run(self._thread, span.rows, client)
        except BaseException:
            share.release()
            raise
        return share

    def stop(self) -> None:
        """Ends the thread, for good."""
        self._thread.shutdown(wait=False, cancel_futures=True)
