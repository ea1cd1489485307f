"""Configuration of an `LLM`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from inspect import cleandoc
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.argument_checks import ArgumentError, check_fields, has_type, shown, wrong
from dflash_jax.checkpoint.load import DRAFT_TOKENS
from dflash_jax.engine.memory import device_memory, has_pinned_memory
from dflash_jax.models.drafting import Drafting, check_complete
from dflash_jax.options.option import faults, options_of
from dflash_jax.options.shared import LLMOptions, has_fp8_caches
from dflash_jax.parallel.sharding import Layout

TINY = Path(__file__).parents[1] / "assets" / "tiny"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Characters of a path, and of any other word but a template.
MAX_PATH = 4096
# What all processes of one model need alike: it makes the programs and the weights. Paths may differ.
SHARED = (
    "revision", "draft_revision", "hf_overrides", "dtype", "quantize", "load_format", "kv_cache_dtype", "activations",
    "mesh", "decode_context_parallel_size", "kernels", "max_block_size", "draft_window_size", "draft_sink_size",
    "language_model_only", "reproducible",
)  # fmt: skip
# A drafter's directory or repo, "mtp", "auto", or an object.
Draft = str | Path | Drafting


@dataclass(frozen=True)
class LLMConfig(LLMOptions):
    """The keywords of `LLM`. Values that do not depend on a checkpoint are checked when one is made.

    A drafter may be an object, a `Drafting` of the caller's, and a mesh may be a `Layout`.
    """

    draft: Draft | Sequence[Draft] | None = LLMOptions.draft
    mesh: str | Layout | None = None

    def __post_init__(self):
        for drafter in self.draft if isinstance(self.draft, list | tuple) else (self.draft,):
            check_complete(drafter)
        check_fields(self)
        for field in fields(self):
            values = self.drafts if field.name == "draft" else (getattr(self, field.name),)
            for value in values:
                if isinstance(value, str | Path) and not _is_possible(field.name, value):
                    right = f"text without NUL that the system can hold, as a path at most {MAX_PATH} characters"
                    raise wrong(field.name, value, right)
        if not isinstance(self.draft, Draft | None):
            names = [str(each) if isinstance(each, str | Path) else id(each) for each in self.draft]
            if not len(set(names)) == len(names) > 0 or not {"auto", "none"}.isdisjoint(names):
                raise wrong("draft", self.draft, 'a list of different drafters: directories, repo ids, "mtp", objects')
            if self.reproducible and len(self.draft) > 1:
                raise wrong("draft", self.draft, "one drafter where reproducible is set, which has rounds of one kind")
        repos = (("revision", self.revision, (self.target,)), ("draft_revision", self.draft_revision, self.drafts))
        for name, value, sources in repos:
            count = sum(isinstance(each, str | Path) and each not in ("auto", "mtp") for each in sources)
            if value is not None and count != 1:
                fault = "there is no repo that it could be of" if count == 0 else "there are several repos"
                raise ArgumentError(name, f"is {shown(value)}: {fault}")

        for option, value in faults(LLMOptions, vars(self)):
            raise wrong(option.name, value, str(option.right))
        if self.draft_sink_size and self.draft_window_size is None:
            fault = f"is {shown(self.draft_sink_size)} without a draft_window_size: sinks are kept beside one"
            raise ArgumentError("draft_sink_size", fault)
        for name in ("chat_template_kwargs", "hf_overrides"):
            if not all(isinstance(key, str) for key in getattr(self, name) or ()):
                raise wrong(name, getattr(self, name), "a dict whose keys are strings")
        if not _are_counts(self.limit_mm_per_prompt or {}):
            raise wrong(
                "limit_mm_per_prompt", self.limit_mm_per_prompt, "a dict of whole numbers under image and video"
            )
        if self.prefix_host_bytes and self.prefix_bytes == 0:
            raise wrong("prefix_host_bytes", self.prefix_host_bytes, "0, since prefix_bytes is 0: no prefix is kept")
        layout = self.layout
        if self.decode_context_parallel_size > layout.tensor * layout.expert:
            right = f"at most {layout.tensor * layout.expert}, the devices of mesh {layout} that divide a model"
            raise wrong("decode_context_parallel_size", self.decode_context_parallel_size, right)

    @property
    def drafts(self) -> tuple[Draft, ...]:
        """The drafters: none, one ("auto" among them) or several."""
        if self.draft is None:
            return ()
        return (self.draft,) if isinstance(self.draft, Draft) else tuple(self.draft)

    @property
    def is_dummy(self) -> bool:
        """Whether the target has random weights."""
        return self.load_format == "dummy"

    def shared(self) -> dict[str, str]:
        """The values of `SHARED`, as text, and the drafters and lists of tokens without their paths."""
        drafts = [each if each in ("auto", "mtp") else "named" for each in self.drafts]
        tokens = self.draft_tokens
        if tokens == "auto":
            places = [Path(each).expanduser() for each in self.drafts if isinstance(each, str | Path)]
            lists = [path for place in places if (path := place / DRAFT_TOKENS).exists()]
        else:
            lists = [] if tokens in (None, "none") else [Path(tokens).expanduser()]
        digests = ", ".join(_digest(path) for path in lists) or str(tokens)
        return {name: str(getattr(self, name)) for name in SHARED} | {"draft": str(drafts), "draft_tokens": digests}

    @property
    def layout(self) -> Layout:
        """The mesh as a `Layout`."""
        layout = self.mesh if isinstance(self.mesh, Layout) else Layout.parse(self.mesh or "")
        size = self.decode_context_parallel_size
        return layout if size == 1 else replace(layout, decode_context_parallel=size)

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights, "float32" or "bfloat16"."""
        if self.dtype in (None, "auto"):
            return "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return self.dtype

    @property
    def has_fp8_caches(self) -> bool:
        """Whether keys and values are in FP8. Raises InputError where they would have another dtype than weights."""
        return has_fp8_caches(self.kv_cache_dtype, self.dtype_name)

    @property
    def prefix_budget(self) -> int:
        """Bytes of the prefix cache."""
        if self.prefix_bytes is not None:
            return self.prefix_bytes
        return 2**28 if jax.default_backend() == "cpu" else device_memory() // 20

    def prefix_host_budget(self, free: int) -> int:
        """Bytes of the prefix cache's tier on the host; ``free``: those of the host's memory that are free."""
        if self.prefix_host_bytes is not None:
            return self.prefix_host_bytes
        if not self.prefix_budget or not has_pinned_memory():
            return 0
        return free // 4

    def swap_budget(self, free: int) -> int:
        """Bytes of a device's pages that may wait on the host; ``free`` as in `prefix_host_budget`."""
        if self.swap_space is not None:
            return int(self.swap_space * 2**30)
        return free // (4 * jax.local_device_count())

    def largest_block(self, drafter_block: int) -> int:
        """The largest block size with a drafter of block size ``drafter_block``; 1 is no drafter.

        Raises:
            InputError: max_block_size is greater than the drafter's.
        """
        if self.max_block_size is not None and self.max_block_size > drafter_block:
            reason = "the drafter's own block size" if drafter_block > 1 else "since there is no drafter"
            raise wrong("max_block_size", self.max_block_size, f"at most {drafter_block}, {reason}")
        return self.max_block_size or drafter_block

    def positions(self, limit: int) -> int:
        """Positions of a request on a model of ``limit`` positions. Raises InputError where max_len does not fit."""
        positions = limit if self.max_len is None else self.max_len
        if not 1 < positions <= limit:
            raise wrong("max_len", self.max_len, f"2 to {limit}, the model's positions")
        return positions


_texts = (f"\n    {name}: {each.help}" for name, each in options_of(LLMOptions).items())
LLMConfig.__doc__ = f"{cleandoc(LLMConfig.__doc__ or '')}\n\nAttributes:{''.join(_texts)}"


def _digest(path: Path) -> str:
    """A short digest of a file, in words; one that cannot be read is refused later, by name."""
    try:
        return f"a file of digest {blake2b(path.read_bytes(), digest_size=8).hexdigest()}"
    except OSError:
        return "unreadable"


def _are_counts(counts: dict) -> bool:
    """Whether a dict has numbers of images and videos."""
    return all(kind in ("image", "video") and has_type(n, int) and n >= 0 for kind, n in counts.items())


def _is_possible(name: str, value: str | Path) -> bool:
    """Whether the system takes a string or path: UTF-8 or the bytes of a file's name, without NUL, not too long."""
    try:
        encoded = os.fsencode(value)
        return b"\0" not in encoded and (name == "chat_template" or len(encoded) <= MAX_PATH)
    except UnicodeEncodeError:
        return False
