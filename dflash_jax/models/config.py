"""What a model is, as frozen (hashable) data. Families fill these from a Hugging Face ``config.json``."""

from dataclasses import dataclass

from dflash_jax.errors import InputError


@dataclass(frozen=True)
class YarnSpec:
    """YaRN context extension (arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class Llama3Spec:
    """Llama 3.1's context extension: low frequencies are divided by ``factor``, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first ``dim`` dimensions of a head (rotate-half form).

    ``sections`` are the numbers of frequencies that follow the (time, height, width) position rows, interleaved; None
    for plain one-dimensional positions.
    """

    theta: float
    dim: int
    sections: tuple[int, int, int] | None = None
    scaling: YarnSpec | Llama3Spec | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query softmax attention; ``gated`` adds a sigmoid output gate that the query projection also produces."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    gated: bool = False
    qk_norm: bool = True


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet: value head h reads key head h // (num_value_heads / num_key_heads)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def channels_per_key(self) -> int:
        """Convolution channels of one key head's group: its q, its k and its value heads."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim


@dataclass(frozen=True)
class MlpSpec:
    """SwiGLU."""

    intermediate_size: int


@dataclass(frozen=True)
class MoeSpec:
    """Routed SwiGLU experts, plus a sigmoid-gated shared one where ``shared_intermediate_size`` is set."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None = None
    normalise_top_k: bool = True


@dataclass(frozen=True)
class LayerSpec:
    mixer: AttentionSpec | GatedDeltaSpec
    ffn: MlpSpec | MoeSpec


@dataclass(frozen=True)
class ModelConfig:
    """A target. ``norm_offset`` is added to every stored RMSNorm weight (1 where the checkpoint stores w - 1)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float
    max_positions: int
    tied_embeddings: bool = False


@dataclass(frozen=True)
class DraftLayerSpec:
    """One drafter layer. ``window``: None for full attention; ``causal``: within the block."""

    attention: AttentionSpec
    intermediate_size: int
    window: int | None
    causal: bool


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter. ``target_layer_ids`` i means "the output of target layer i, before any norm"."""

    hidden_size: int
    vocab_size: int
    layers: tuple[DraftLayerSpec, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    norm_eps: float
    max_positions: int

    def check_fits(self, target: ModelConfig) -> None:
        """Raises InputError where this drafter cannot have been made for ``target``."""
        if self.hidden_size != target.hidden_size:
            raise InputError(
                f"the drafter's hidden size is {self.hidden_size}, the target's is {target.hidden_size}: they differ"
            )
        if self.vocab_size != target.vocab_size:
            raise InputError(
                f"the drafter's vocabulary has {self.vocab_size} tokens, the target's {target.vocab_size}: they differ"
            )
        depth = len(target.layers)
        if self.num_target_layers != depth:
            raise InputError(f"the drafter is for a target of {self.num_target_layers} layers, this target has {depth}")
        outside = [i for i in self.target_layer_ids if not 0 <= i < depth]
        if outside:
            raise InputError(f"the drafter taps target layers {outside}, the target's layers are 0 to {depth - 1}")
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise InputError(
                f"the drafter's mask_token_id {self.mask_token_id} is out of vocabulary: ids are 0 to "
                f"{target.vocab_size - 1}"
            )
