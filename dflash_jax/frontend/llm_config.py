"""Configuration of an `LLM`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.argument_checks import ArgumentError, check_fields, has_type, shown, wrong
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.memory import device_memory, has_pinned_memory
from dflash_jax.engine.model_runner import BATCH_SIZES
from dflash_jax.models.drafting import Drafting, check_complete
from dflash_jax.parallel.sharding import Layout

TINY = Path(__file__).parents[1] / "assets" / "tiny"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# More than any machine's memory.
MAX_BYTES = 2**50
# Characters of a path, and of any other word but a template.
MAX_PATH = 4096
# A drafter's directory or repo, "mtp", "auto", or an object.
Draft = str | Path | Drafting


@dataclass(frozen=True)
class LLMConfig:
    """The keywords of `LLM`. Values that do not depend on a checkpoint are checked when one is made.

    Attributes:
        target: A Hugging Face directory or repo id; "smollm2" for SmolLM2-135M-Instruct, which is downloaded once; None
            for the tiny pair that ships with the package.
        draft: The same for the drafter, or None to decode without one; "mtp" is the target's own MTP head; "auto" is
            the drafter that ships with the tiny target or with "smollm2", and None for any other; an object is a
            `Drafting` of the caller's. A list has several drafters, of which each dispatch takes the one that is
            expected to be the fastest.
        dtype: "float32" or "bfloat16"; None or "auto" takes float32 on CPU and bfloat16 elsewhere.
        block_size: Tokens that a round may yield, at most the drafter's own block size; 1 is plain decoding; "auto"
            chooses the fastest by load and acceptance.
        max_block_size: Upper bound of all block sizes, at most the drafter's own; 16 is that of a caller's object.
        slots: Prompts that are continued at a time.
        prefix_bytes: Bytes for the cache of prefixes that prompts share; None takes a twentieth of the device's memory,
            256 MiB on CPU.
        prefix_host_bytes: Bytes of the host's pinned memory for prefixes that the device has no room for; None takes a
            quarter of what is free, and none on CPU, where both would be the same memory.
        swap_space: GiB of the host's memory for each device, where requests wait whose pages leave the device; those
            that it has no room for compute their tokens again. None takes a quarter of what is free, divided among the
            devices.
        mem_fraction: Share of a device's memory that may be used.
        draft_window_size: The last positions of the context that the drafter sees; None for all.
        draft_sink_size: The first positions that it sees beside them.
        reproducible: The same bits with any drafter, block size or batch, at some cost in speed. In float32 the tokens
            are the same without it.
        max_len: Prompt and new tokens of a request, at most the model's positions, which is the default.
        mesh: Devices that share the work, such as "data=2,tensor=4"; one device by default.
        decode_context_parallel_size: Devices that share each page of keys and values, of those that would otherwise
            have copies of a KV head: 4 divides the pages of 2 KV heads on "tensor=8" by 4. The order of sums changes.
        quantize: "int8" or "fp8" for a target whose checkpoint is not quantised; "none" dequantises an FP8 checkpoint,
            which otherwise stays FP8.
        draft_tokens: A JSON list of the only token ids that are drafted, by each of several drafters, which spares them
            most of the head; "auto" takes each drafter's own draft_tokens.json (an MTP head's is in the target's
            directory) where it has one and the head is not divided over devices; None is all tokens.
        tokenizer: A directory or repo id in place of the target's.
        chat_template: A Jinja file, or the template itself, in place of the tokenizer's.
        chat_template_kwargs: Defaults of the template's options, such as ``{"enable_thinking": False}``.
        revision: A branch, tag or commit of the target's repo.
        draft_revision: The same of the drafter's repo.
        download_dir: Directory for repos.
        hf_overrides: Values in place of those of the target's config.json, of which objects are merged, such as
            ``{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}``.
        generation_config: "auto" takes sampling defaults from the target's generation_config.json, "vllm" takes none, a
            path takes another file's.
        sampling_defaults: Values that override those defaults.
        kernels: "auto", or "xla" for none of this package's own.
        seed: Of the seeds that requests without one get; None takes random ones.
        language_model_only: Whether the checkpoint's vision tower is left out; prompts are then text.
        limit_mm_per_prompt: Most images and videos of a prompt, such as ``{"image": 4, "video": 1}``.
        media_cache_bytes: Bytes of the host's memory for the tower's outputs, which spare it images that come again.
        allowed_media_domains: Hosts that images and videos are fetched from; "*" is any public one. By default none is.
        allowed_local_media_path: Directory below which ``file:`` URLs are read. Paths need none: the caller opens them.
    """

    target: str | Path | None = None
    draft: Draft | Sequence[Draft] | None = "auto"
    dtype: str | None = None
    block_size: BlockSize = "auto"
    max_block_size: int | None = None
    slots: int = 32
    prefix_bytes: int | None = None
    prefix_host_bytes: int | None = None
    swap_space: float | None = None
    mem_fraction: float = 0.9
    draft_window_size: int | None = None
    draft_sink_size: int = 0
    reproducible: bool = False
    max_len: int | None = None
    mesh: str | Layout = ""
    decode_context_parallel_size: int = 1
    quantize: str | None = None
    draft_tokens: str | Path | None = "auto"
    tokenizer: str | Path | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict | None = None
    revision: str | None = None
    draft_revision: str | None = None
    download_dir: str | Path | None = None
    hf_overrides: dict | None = None
    generation_config: str | Path = "auto"
    sampling_defaults: dict | None = None
    kernels: str = "auto"
    seed: int | None = None
    language_model_only: bool = False
    limit_mm_per_prompt: dict | None = None
    media_cache_bytes: int = 2**28
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str | Path | None = None

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

        def check(name, good, right):
            value = getattr(self, name)
            if value is not None and not good(value):
                raise wrong(name, value, right)

        check("dtype", lambda v: v in ("auto", *DTYPES), f"one of auto, {', '.join(DTYPES)}")
        check("draft_window_size", lambda v: v >= 1, "1 or more")
        check("draft_sink_size", lambda v: v >= 0, "0 or more")
        if self.draft_sink_size and self.draft_window_size is None:
            fault = f"is {shown(self.draft_sink_size)} without a draft_window_size: sinks are kept beside one"
            raise ArgumentError("draft_sink_size", fault)
        check("chat_template_kwargs", lambda v: all(isinstance(k, str) for k in v), "a dict whose keys are strings")
        check("hf_overrides", lambda v: all(isinstance(k, str) for k in v), "a dict whose keys are strings")
        check("max_block_size", lambda v: v >= 1, "1 or more")
        check("slots", lambda v: 1 <= v <= BATCH_SIZES[-1], f"1 to {BATCH_SIZES[-1]}")
        check("prefix_bytes", lambda v: 0 <= v <= MAX_BYTES, f"0 (none) to {MAX_BYTES}")
        check("prefix_host_bytes", lambda v: 0 <= v <= MAX_BYTES, f"0 (none) to {MAX_BYTES}")
        if self.prefix_host_bytes and self.prefix_bytes == 0:
            raise wrong("prefix_host_bytes", self.prefix_host_bytes, "0, since prefix_bytes is 0: no prefix is kept")
        check("swap_space", lambda v: 0 <= v * 2**30 <= MAX_BYTES, f"0 (none) to {MAX_BYTES >> 30}")
        check("media_cache_bytes", lambda v: 0 <= v <= MAX_BYTES, f"0 (none) to {MAX_BYTES}")
        check("limit_mm_per_prompt", _are_counts, "a dict of whole numbers under image and video")
        check("mem_fraction", lambda v: 0 < v <= 1, "above 0 and at most 1")
        check("decode_context_parallel_size", lambda v: v >= 1, "1 or more")
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
    def layout(self) -> Layout:
        """The mesh as a `Layout`."""
        layout = Layout.parse(self.mesh) if isinstance(self.mesh, str) else self.mesh
        size = self.decode_context_parallel_size
        return layout if size == 1 else replace(layout, decode_context_parallel=size)

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights, "float32" or "bfloat16"."""
        if self.dtype in (None, "auto"):
            return "float32" if jax.default_backend() == "cpu" else "bfloat16"
        return self.dtype

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
