"""Configuration of an `LLM`."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.argument_checks import check_fields
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.memory import device_memory
from dflash_jax.engine.model_runner import BATCH_SIZES
from dflash_jax.errors import InputError
from dflash_jax.parallel.sharding import Layout

TINY = Path(__file__).parents[1] / "assets" / "tiny"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclass(frozen=True)
class LLMConfig:
    """The keywords of `LLM`. Values that do not depend on a checkpoint are checked when one is made.

    Attributes:
        target: A Hugging Face directory or repo id; None for the tiny pair that ships with the package.
        draft: The same for the drafter, or None to decode without one; "auto" is the tiny drafter for the tiny target
            and None for any other.
        dtype: "float32" or "bfloat16"; None or "auto" takes float32 on CPU and bfloat16 elsewhere.
        block_size: Tokens that a round may yield, at most the drafter's own block size; 1 is plain decoding; "auto"
            chooses the fastest by load and acceptance.
        max_block_size: Upper bound of all block sizes.
        slots: Prompts that are continued at a time.
        prefix_bytes: Bytes for the cache of prefixes that prompts share; None takes a twentieth of the device's memory,
            256 MiB on CPU.
        mem_fraction: Share of a device's memory that may be used.
        draft_window_size: The last positions of the context that the drafter sees; None for all.
        draft_sink_size: The first positions that it sees beside them.
        reproducible: The same bits with any drafter, block size or batch, at some cost in speed. In float32 the tokens
            are the same without it.
        max_len: Prompt and new tokens of a request, at most the model's positions, which is the default.
        mesh: Devices that share the work, such as "data=2,tensor=4"; one device by default.
        quantize: "int8" or "fp8" for a target whose checkpoint is not quantised; "none" dequantises an FP8 checkpoint,
            which otherwise stays FP8.
        draft_tokens: A JSON list of the only token ids that are drafted, which spares the drafter most of the head;
            "auto" takes the drafter's draft_tokens.json where it has one and the head is not divided over devices; None
            is all tokens.
        tokenizer: A directory or repo id in place of the target's.
        chat_template: A Jinja file, or the template itself, in place of the tokenizer's.
        chat_template_kwargs: Defaults of the template's options, such as ``{"enable_thinking": False}``.
        revision: A branch, tag or commit of the target's repo.
        draft_revision: The same of the drafter's repo.
        download_dir: Directory for repos.
        generation_config: "auto" takes sampling defaults from the target's generation_config.json, "vllm" takes none, a
            path takes another file's.
        sampling_defaults: Values that override those defaults.
        kernels: "auto", or "xla" for none of this package's own.
        seed: Of the seeds that requests without one get; None takes random ones.
    """

    target: str | Path | None = None
    draft: str | Path | None = "auto"
    dtype: str | None = None
    block_size: BlockSize = "auto"
    max_block_size: int | None = None
    slots: int = 32
    prefix_bytes: int | None = None
    mem_fraction: float = 0.9
    draft_window_size: int | None = None
    draft_sink_size: int = 0
    reproducible: bool = False
    max_len: int | None = None
    mesh: str | Layout = ""
    quantize: str | None = None
    draft_tokens: str | Path | None = "auto"
    tokenizer: str | Path | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict | None = None
    revision: str | None = None
    draft_revision: str | None = None
    download_dir: str | Path | None = None
    generation_config: str | Path = "auto"
    sampling_defaults: dict | None = None
    kernels: str = "auto"
    seed: int | None = None

    def __post_init__(self):
        check_fields(self)
        repos = (("revision", self.revision, self.target), ("draft_revision", self.draft_revision, self.draft))
        for name, value, repo in repos:
            if value is not None and repo in (None, "auto"):
                raise InputError(f"{name} {value}: there is no repo that it could be of")
        if self.dtype not in (None, "auto", *DTYPES):
            raise InputError(f"dtype {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        if self.draft_window_size is not None and self.draft_window_size < 1:
            raise InputError(f"draft window size {self.draft_window_size}: it must be 1 or more")
        if self.draft_sink_size < 0:
            raise InputError(f"draft sink size {self.draft_sink_size}: it must be 0 or more")
        if self.draft_sink_size and self.draft_window_size is None:
            raise InputError(
                f"draft sink size {self.draft_sink_size} without a draft window size: sinks are kept beside one"
            )
        if self.max_block_size is not None and self.max_block_size < 1:
            raise InputError(f"max block size {self.max_block_size}: it must be 1 or more")
        if not 1 <= self.slots <= BATCH_SIZES[-1]:
            raise InputError(f"slots {self.slots}: it must be 1 to {BATCH_SIZES[-1]}")
        if self.prefix_bytes is not None and self.prefix_bytes < 0:
            raise InputError(f"prefix_bytes {self.prefix_bytes}: it must be 0 (none) or more")
        if not 0 < self.mem_fraction <= 1:
            raise InputError(f"mem_fraction {self.mem_fraction}: it must be above 0 and at most 1")
        if isinstance(self.mesh, str):
            Layout.parse(self.mesh)

    @property
    def layout(self) -> Layout:
        """The mesh as a `Layout`."""
        return Layout.parse(self.mesh) if isinstance(self.mesh, str) else self.mesh

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

    def largest_block(self, drafter_block: int) -> int:
        """The largest block size with a drafter of block size ``drafter_block``."""
        return min(drafter_block, self.max_block_size or drafter_block)

    def positions(self, limit: int) -> int:
        """Positions of a request on a model of ``limit`` positions. Raises InputError where max_len does not fit."""
        positions = limit if self.max_len is None else self.max_len
        if not 1 < positions <= limit:
            raise InputError(f"max_len {self.max_len}: it must be 2 to {limit}, the model's positions")
        return positions
