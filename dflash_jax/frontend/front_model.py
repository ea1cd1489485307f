"""The model as a front process knows it: its tokenizer, defaults and media, without weights and without JAX."""

from dataclasses import dataclass, replace
from pathlib import Path

from dflash_jax.checkpoint.config_files import read_config_file
from dflash_jax.engine.config import BlockSize
from dflash_jax.frontend.media import MediaReader
from dflash_jax.frontend.prompts import Prompts
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.media.fetch import Fetcher
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.processor import image_settings
from dflash_jax.media.video import video_settings
from dflash_jax.models import families
from dflash_jax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The files of a target that text and media need, and the options that change how they are read.

    All values are plain: JSON can hold them.

    Attributes:
        directory: The target's directory.
        tokenizer_directory: The tokenizer's; None where there is none.
        chat_template: The text of a template in place of the tokenizer's.
        chat_template_kwargs: As in `LLMConfig`, like all that follow.
        hf_overrides: Values in place of those of config.json.
        generation_config: Where sampling defaults are read from.
        sampling_defaults: Sampling defaults in place of those.
        logprobs_mode: What log-probabilities are by default.
        limit_mm_per_prompt: Images and videos of a prompt.
        allowed_media_domains: Hosts that images and videos may come from.
        allowed_local_media_path: The directory that they may come from.
    """

    directory: str
    tokenizer_directory: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict | None = None
    hf_overrides: dict | None = None
    generation_config: str = "auto"
    sampling_defaults: dict | None = None
    logprobs_mode: str | None = None
    limit_mm_per_prompt: dict | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None

    def config(self) -> ModelConfig:
        """The target's configuration."""
        return read_config_file(Path(self.directory), families.read_target, self.hf_overrides)[1]

    def defaults(self) -> SamplingDefaults:
        """The sampling defaults and stop ids."""
        defaults = SamplingDefaults.read(Path(self.directory), self.generation_config, self.hf_overrides)
        return replace(defaults.overridden(self.sampling_defaults or {}), logprobs_mode=self.logprobs_mode)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its chat template."""
        if self.tokenizer_directory is None:
            return None
        return Tokenizer(Path(self.tokenizer_directory), self.chat_template, self.chat_template_kwargs)

    def media_reader(self, config: ModelConfig, tokenizer: Tokenizer | None) -> MediaReader:
        """Reads images and videos for the target of ``config``, which has a vision tower."""
        assert config.vision is not None
        assert config.media_tokens is not None
        directory, local = Path(self.directory), self.allowed_local_media_path
        limits = MediaLimits(**{f"{kind}s": n for kind, n in (self.limit_mm_per_prompt or {}).items()})
        return MediaReader(
            config.vision.merge_size,
            config.media_tokens,
            image_settings(directory),
            video_settings(directory),
            limits,
            None if tokenizer is None else tokenizer.encode_plain,
            Fetcher(self.allowed_media_domains, None if local is None else Path(local), limits),
        )


@dataclass(frozen=True, kw_only=True)
class ModelFacts(ModelFiles):
    """What a front must know of a model, plain values like those of `ModelFiles`; `LLM.facts` makes it.

    Attributes:
        max_len: Positions of a request.
        slots: Prompts that are continued at a time.
        block_size: Tokens that a round may yield, or "auto".
        largest_block: The largest block size; 1 without a drafter.
        dtype: "float32" or "bfloat16".
        drafting_method: As of `LLM.drafting_method`.
        draft_places: As in `LLM`.
        takes_media: Whether there may be images and videos: the model has a vision tower, and it is loaded.
    """

    max_len: int
    slots: int
    block_size: BlockSize
    largest_block: int
    dtype: str
    drafting_method: str | None
    draft_places: dict[str, int]
    takes_media: bool


class FrontModel(Prompts):
    """A model of which only text and media are read: what a front process has in place of an `LLM`.

    The attributes are documented with `LLM`.
    """

    def __init__(self, facts: ModelFacts):
        self.config, self.directory = facts.config(), Path(facts.directory)
        self.defaults, self.tokenizer = facts.defaults(), facts.tokenizer()
        self.max_len, self.slots, self.dtype = facts.max_len, facts.slots, facts.dtype
        self.block_size, self.largest_block = facts.block_size, facts.largest_block
        self.drafting_method, self.draft_places = facts.drafting_method, facts.draft_places
        self.media = facts.media_reader(self.config, self.tokenizer) if facts.takes_media else None
