"""Configuration of an MTP head, which is that of its target."""

from dataclasses import dataclass, field

from dflash_jax.models.config import AttentionSpec, LayerSpec, ModelConfig, MoeSpec, check_sizes


@dataclass(frozen=True)
class MtpConfig:
    """The multi-token prediction head of a target, as a drafter.

    Attributes:
        target: The target that it was trained with.
        block_size: Places of a block at most: the last known token and the drafts, a step of the head each.
        acceptance_rates: As in `DraftConfig`.
    """

    target: ModelConfig
    block_size: int = 8
    acceptance_rates: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Its one layer: attention as the target's, and experts where the target has any."""
        mixers, ffns = ([getattr(spec, part) for spec in self.target.layers] for part in ("mixer", "ffn"))
        experts = next((ffn for ffn in ffns if isinstance(ffn, MoeSpec)), ffns[0])
        return (LayerSpec(next(m for m in mixers if isinstance(m, AttentionSpec)), experts),)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.target.hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.target.vocab_size

    def passes(self, block_size: int) -> tuple[int, int]:
        """As `DraftConfig.passes`."""
        return block_size - 1, 1

    def check_fits(self, target: ModelConfig) -> None:
        """As `DraftConfig.check_fits`."""
        check_sizes(self.hidden_size, self.vocab_size, len(self.target.layers), target)
