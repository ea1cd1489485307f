"""`VisionEncoder`: images and videos → rows for their tokens, by the vision tower, apart from the engine's programs.

The tower's program is compiled for a few numbers of patches, `SIZES`: powers of two from 256, so that at most half of a
pass is padding, and nine programs serve every image up to the largest of published checkpoints (16,777,216 pixels are
65,536 patches of 16 by 16). Padding costs its share of the products, and nothing in the attention, which skips tiles
that no patch sees. Since a patch sees its own frame only, frames of several media share a pass where they fit, and a
video that does not fit runs in groups of frames.

A pass of many patches takes several calls of the program, a few blocks each: a device runs the engine's programs in
between, so that streams wait for one call of the tower at most.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled

from dflash_jax.engine.media import MediaSpan, PromptMedia, UnencodedMedia
from dflash_jax.errors import UnavailableError
from dflash_jax.media.medium import MOST_PATCHES, Medium, check_grid
from dflash_jax.models.config import VisionConfig
from dflash_jax.models.vision import VisionTower, frame_arrays
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout

# Patches of a pass.
SIZES = tuple(MOST_PATCHES >> k for k in reversed(range(9)))
# Floating-point operations of a call, where a block has fewer: 25 ms at 400 TFLOP/s.
CALL_FLOPS = 10**13
# Temporaries of a call, bytes for each feature of a patch (compiled for a CPU: 37 in float32, whatever the depth).
WORKSPACE_BYTES = 40


def workspace(config: VisionConfig, patches: int = SIZES[-1]) -> int:
    """Bytes that a call of ``patches`` patches takes on a device beside the weights, estimated: its input included."""
    return patches * (WORKSPACE_BYTES * config.hidden_size + 4 * config.patch_dim)


def blocks_of_call(config: VisionConfig, patches: int) -> int:
    """Blocks that run in one call of ``patches`` patches, those of one frame: as many as `CALL_FLOPS` allows."""
    hidden = config.hidden_size
    products = 2 * patches * hidden * (4 * hidden + 2 * config.intermediate_size)
    return max(1, min(config.depth, CALL_FLOPS // (products + 4 * patches**2 * hidden)))


def call_arguments(tower: VisionTower, size: int, frames: Sequence["_Frame"] = ()) -> dict[str, np.ndarray]:
    """The arguments of `VisionTower.__call__` for the first call of a pass over ``size`` patches, padding included."""
    config = tower.config
    patches = np.zeros((size, config.patch_dim), np.float32)
    if frames:
        given = [frame.patches for frame in frames]
        np.concatenate(given, out=patches[: sum(map(len, given))])
    return {
        "x": np.zeros((size, config.hidden_size), tower.dtype),
        "first": np.zeros((), np.int32),
        "last": np.zeros((), np.int32),
        "patches": patches,
        **frame_arrays([frame.shape for frame in frames], size, config.merge_size),
    }


def lowered(tower: VisionTower, shapes: dict[str, jax.ShapeDtypeStruct], sharding: NamedSharding | None = None):
    """The program of a call, before compilation. ``x`` is donated."""
    function = jax.jit(VisionTower.__call__, out_shardings=sharding, donate_argnames="x")
    # Accelerators would multiply float32 in fewer bits by default.
    with jax.default_matmul_precision("highest" if tower.dtype == jnp.float32 else "default"):
        return function.lower(tower, **shapes)


class OutputCache:
    """Rows of media by key, on the host. The least recently used are evicted first. Threads may share it.

    Args:
        budget: Bytes at most; 0 caches nothing.

    Attributes:
        size: Bytes in use.
    """

    def __init__(self, budget: int):
        self.budget, self.size = budget, 0
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def find(self, keys: Iterable[bytes]) -> dict[bytes, np.ndarray]:
        """The rows of those keys that have some. They count as used now."""
        with self._lock:
            found = {key: self._rows[key] for key in keys if key in self._rows}
            for key in found:
                self._rows.move_to_end(key)
            return found

    def add(self, key: bytes, rows: np.ndarray) -> None:
        """Adds the rows of a key, unless they alone are larger than the budget."""
        with self._lock:
            if key in self._rows or rows.nbytes > self.budget:
                return
            self._rows[key] = rows
            self.size += rows.nbytes
            while self.size > self.budget:
                _, evicted = self._rows.popitem(last=False)
                self.size -= evicted.nbytes


@dataclass(frozen=True)
class _Frame:
    """A frame of a medium: which medium, its rows and columns, and its patches [rows · columns, patch]."""

    medium: int
    shape: tuple[int, int]
    patches: np.ndarray


class _LazyMedium:
    """An image or a video and its rows, which the tower computes when they are first asked for.

    It keeps its pixels until then.

    Args:
        medium: The image or video.
        encoder: The tower.
    """

    def __init__(self, medium: Medium, encoder: "VisionEncoder"):
        self._key, self._medium, self._encoder = medium.key, medium, encoder

    @cached_property
    def rows(self) -> np.ndarray:
        """What takes the place of its tokens' embeddings, [tokens, H]."""
        (rows,) = self._encoder.encode([self._medium])
        del self._medium
        return rows

    def is_encoded(self) -> bool:
        """Whether its rows are known, or kept from another request."""
        return "rows" in vars(self) or self._key in self._encoder.outputs

    def span(self, start: int, length: int, offset: int) -> MediaSpan:
        """Its rows from ``offset`` on as a span of a prompt that begins at ``start``."""
        key = self._key + offset.to_bytes(8, "little")
        return MediaSpan(start, length, key, lambda: self.rows[offset : offset + length], self.is_encoded)


class VisionEncoder:
    """Runs a vision tower over media. Threads may share it: calls run one after another.

    Args:
        tower: The tower, whole on every device of the mesh.
        layout: The mesh.
        cache_bytes: Bytes of outputs that are kept on the host.
        sizes: Patches of a pass that programs are compiled for, ascending, multiples of a merge block's patches.

    Attributes:
        tower: The tower.
        config: Its configuration.
        sizes: Patches of a pass.
        outputs: The outputs that are kept.
        calls: Calls of the tower so far.
    """

    def __init__(
        self, tower: VisionTower, layout: Layout = ONE_DEVICE, cache_bytes: int = 0, sizes: Sequence[int] = SIZES
    ):
        self.config, self.sizes, self.outputs = tower.config, tuple(sizes), OutputCache(cache_bytes)
        self.calls = 0
        self.tower = tower
        self._sharding = NamedSharding(layout.mesh(), PartitionSpec())
        self._programs: dict[int, Compiled] = {}
        self._running, self._compiling = threading.Lock(), threading.Lock()

    def device_bytes(self, positions: int) -> int:
        """Bytes of the tower on a device: its parameters, and the `workspace` of a call.

        Args:
            positions: Tokens of a prompt, which bound those of an image.
        """
        largest = self.sizes_for(positions)[-1]
        return sum(x.nbytes for x in jax.tree.leaves(self.tower)) + workspace(self.config, largest)

    def sizes_for(self, positions: int) -> tuple[int, ...]:
        """The sizes of passes that media of a prompt of ``positions`` tokens may need, ascending."""
        most = positions * self.config.block_patches
        return tuple(s for i, s in enumerate(self.sizes) if i == 0 or self.sizes[i - 1] < most)

    def compile(self, size: int) -> Compiled:
        """The program for passes of ``size`` patches, compiled at the first use; other threads wait."""
        with self._compiling:
            if size not in self._programs:
                shapes = jax.tree.map(
                    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._sharding),
                    call_arguments(self.tower, size),
                )
                self._programs[size] = lowered(self.tower, shapes, self._sharding).compile()
                self._zeros(shapes["x"])
            return self._programs[size]

    def _zeros(self, like: jax.ShapeDtypeStruct | np.ndarray) -> jax.Array:
        """Made on the device: the first call of a pass does not read it."""
        return jnp.zeros(like.shape, like.dtype, device=self._sharding)

    def encode(self, media: Sequence[Medium]) -> list[np.ndarray]:
        """The rows of media.

        Args:
            media: Images and videos; several of one key are computed once.

        Returns:
            [tokens, out_hidden_size] for each medium, in the tower's dtype, read-only.

        Raises:
            InputError: A medium has a grid that `check_grid` refuses.
        """
        for medium in media:
            check_grid(medium.grid, self.config.merge_size, self.sizes[-1])
        unique = {m.key: m for m in media}
        rows = self.outputs.find(unique)
        if len(rows) < len(unique):
            with self._running:
                # Another thread may have computed some while this one waited.
                rows |= self.outputs.find(unique.keys() - rows.keys())
                rows |= self._compute({key: m for key, m in unique.items() if key not in rows})
        return [rows[m.key] for m in media]

    def prompt_media(self, placed: UnencodedMedia) -> PromptMedia:
        """The media of a prompt as the engine takes them. Their rows are computed when they are first asked for."""
        media = [_LazyMedium(medium, self) for medium in placed.media]
        spans = tuple(media[frame.medium].span(frame.start, frame.length, frame.offset) for frame in placed.frames)
        return PromptMedia(spans, placed.positions, placed.rope_delta)

    def _compute(self, media: dict[bytes, Medium]) -> dict[bytes, np.ndarray]:
        """The rows of media, which are kept."""
        if isinstance(jax.tree.leaves(self.tower)[0], jax.ShapeDtypeStruct):
            raise UnavailableError("the model sleeps: its vision tower has no weights")
        parts: list[list[np.ndarray]] = [[] for _ in media]
        for frames in self._passes(media.values()):
            for frame, part in zip(frames, self._run(frames), strict=True):
                parts[frame.medium].append(part)
        # Copies: slices would keep the padded output of a whole pass.
        rows = {key: np.concatenate(pieces) for key, pieces in zip(media, parts, strict=True)}
        for key, array in rows.items():
            array.flags.writeable = False
            self.outputs.add(key, array)
        return rows

    def _passes(self, media: Iterable[Medium]) -> Iterator[list[_Frame]]:
        """The frames of media in order, as many in a pass as fit."""
        frames, total = [], 0
        for i, medium in enumerate(media):
            count, height, width = medium.grid
            for patches in medium.patches().reshape(count, height * width, self.config.patch_dim):
                if total + len(patches) > self.sizes[-1]:
                    yield frames
                    frames, total = [], 0
                frames.append(_Frame(i, (height, width), patches))
                total += len(patches)
        if frames:
            yield frames

    def _run(self, frames: list[_Frame]) -> list[np.ndarray]:
        """Runs the tower over frames: [tokens, out_hidden_size] of each."""
        lengths = [len(frame.patches) for frame in frames]
        size = next(s for s in self.sizes if s >= sum(lengths))
        program, blocks, depth = self.compile(size), blocks_of_call(self.config, size), self.config.depth
        given = call_arguments(self.tower, size, frames)
        x, tokens = self._zeros(given.pop("x")), None
        arguments = jax.device_put(given, self._sharding)
        for first in range(0, depth, blocks):
            bounds = {"first": np.int32(first), "last": np.int32(min(first + blocks, depth))}
            x, tokens = program(self.tower, x=x, **arguments | jax.device_put(bounds, self._sharding))
            # What the engine dispatches meanwhile runs before the next call.
            jax.block_until_ready(tokens)
            self.calls += 1
        assert tokens is not None, "a tower without blocks"
        ends = np.cumsum(lengths) // self.config.block_patches
        return np.split(np.asarray(tokens)[: ends[-1]], ends[:-1])
