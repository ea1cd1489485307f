"""Configuration of models, as frozen (hashable) data. Families read it from a Hugging Face ``config.json``."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from dflash_jax.errors import InputError


@dataclass(frozen=True)
class YarnSpec:
    """YaRN context extension (arXiv 2309.00071).

    Attributes:
        factor: Extended over original positions.
        original_max_positions: Positions of the original context.
        beta_fast: Rotations over the original context from which a frequency stays as it is.
        beta_slow: Rotations up to which a frequency is divided by ``factor``.
        attention_factor: Factor on cos and sin; None takes the paper's.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class Llama3Spec:
    """Llama 3.1's context extension: low frequencies are divided, high ones stay, with a ramp between.

    Attributes:
        factor: Divisor of low frequencies.
        low_freq_factor: Rotations over the original context below which a frequency is low.
        high_freq_factor: Rotations above which it is high.
        original_max_positions: Positions of the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding in the rotate-half form.

    Attributes:
        theta: Base of the frequencies.
        dim: Leading dimensions of a head that are rotated.
        sections: Numbers of frequencies that follow the time, height and width of a position, interleaved; None for
            one-dimensional positions.
        scaling: Context extension, or None.
    """

    theta: float
    dim: int
    sections: tuple[int, int, int] | None = None
    scaling: YarnSpec | Llama3Spec | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query softmax attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
        rope: Rotary embedding of queries and keys.
        gated: Whether the query projection also produces a sigmoid gate of the output.
        qk_norm: Whether queries and keys are normalised.
        qkv_bias: Whether the projections of queries, keys and values have biases.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    gated: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet (arXiv 2412.06464). Value head h reads key head h // ``values_per_key``.

    Attributes:
        num_key_heads: Query and key heads.
        num_value_heads: Value heads, a multiple of them.
        key_dim: Size of a query or key head.
        value_dim: Size of a value head.
        conv_kernel: Positions that the convolution reads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4

    @property
    def values_per_key(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels_per_key(self) -> int:
        """Convolution channels of one key head's group: its q, its k and its value heads."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim


@dataclass(frozen=True)
class MlpSpec:
    """SwiGLU feed-forward.

    Attributes:
        intermediate_size: Features between the two projections.
    """

    intermediate_size: int


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of SwiGLU experts.

    Attributes:
        num_experts: Routed experts.
        experts_per_token: Experts that each token is routed to.
        intermediate_size: Features of an expert.
        shared_intermediate_size: Features of the sigmoid-gated shared expert; None for no shared expert.
        normalise_top_k: Whether the weights of a token's experts are divided by their sum.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None = None
    normalise_top_k: bool = True


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a target.

    Attributes:
        mixer: Attention or Gated DeltaNet.
        ffn: Dense or mixture of experts.
    """

    mixer: AttentionSpec | GatedDeltaSpec
    ffn: MlpSpec | MoeSpec


@dataclass(frozen=True)
class VisionConfig:
    """A target's vision tower: a transformer over the patches of images and of pairs of video frames.

    Attributes:
        depth: Blocks.
        hidden_size: Width of its residual stream.
        num_heads: Heads of its attention.
        intermediate_size: Features of an MLP.
        patch_size: Pixels of a patch's side.
        temporal_patch_size: Frames of a patch.
        merge_size: Patches of the side of a merge block, which becomes one token.
        in_channels: Channels of a pixel.
        num_positions: Rows of the table of positions, a square grid.
        out_hidden_size: Width of a token, the target's hidden size.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Epsilon of every LayerNorm.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    num_positions: int
    out_hidden_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def block_patches(self) -> int:
        """Patches of a merge block."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Width of a merge block: its patches side by side."""
        return self.hidden_size * self.block_patches

    @property
    def side(self) -> int:
        """Side of the grid of positions."""
        return math.isqrt(self.num_positions)


@dataclass(frozen=True)
class MediaTokens:
    """Token ids that place media in a prompt.

    Attributes:
        image: Place of an image's token.
        video: Place of a video's token.
        vision_start: Opens an image or a frame.
        vision_end: Closes it.
    """

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True)
class ModelConfig:
    """A target.

    Attributes:
        model_type: The ``model_type`` of its ``config.json``.
        vocab_size: Rows of embedding and head.
        hidden_size: Width of the residual stream.
        layers: Its layers.
        norm_eps: Epsilon of every RMSNorm.
        norm_offset: Added to every stored RMSNorm weight: 1 where the checkpoint stores w - 1, else 0.
        max_positions: Positions of its context.
        tied_embeddings: Whether the head is the embedding.
        vision: Its vision tower, a module of its own; None for a model of text. A checkpoint may lack the tower's
            weights.
        media_tokens: The ids that place media in its prompts; None without a tower.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm_offset: float
    max_positions: int
    tied_embeddings: bool = False
    vision: VisionConfig | None = None
    media_tokens: MediaTokens | None = None

    def check_media_tokens(self) -> None:
        """Checks the ids that place media in a prompt.

        Raises:
            InputError: One is out of vocabulary.
        """
        for name, token in asdict(self.media_tokens).items() if self.media_tokens else ():
            if token >= self.vocab_size:
                raise InputError(f"{name}_token_id is {token}, out of vocabulary: ids are 0 to {self.vocab_size - 1}")


@dataclass(frozen=True)
class DraftLayerSpec:
    """One layer of a drafter.

    Attributes:
        attention: Its attention.
        intermediate_size: Features of its MLP.
        window: Positions that a query sees, itself included; None for full attention.
        causal: Whether attention within the block is causal.
    """

    attention: AttentionSpec
    intermediate_size: int
    window: int | None
    causal: bool


@dataclass(frozen=True)
class ConvSpec:
    """The convolutions of DFlash2 around each sublayer of a block.

    Attributes:
        taps: Places that each place reads: itself and those before it.
        group: Channels that share a coefficient of a place.
    """

    taps: int
    group: int


@dataclass(frozen=True)
class SelectorSpec:
    """What judges candidates with the token before them.

    Attributes:
        rank: Size of a token's rows.
        top_k: Candidates of each place.
        kind: "dflash2", with a gate of the place, or one of DSpark's Markov heads: "vanilla" without a gate, "gated"
            with a gate of the place and the token before it, "rnn" with a state of all tokens of the block before it.
    """

    rank: int
    top_k: int
    kind: Literal["dflash2", "vanilla", "gated", "rnn"] = "dflash2"

    def gate_shape(self, hidden: int) -> tuple[int, int] | None:
        """The shape of the gates' projection for a hidden size; None without gates."""
        rank = self.rank
        shapes = {"dflash2": (rank, hidden), "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
        return shapes.get(self.kind)


@dataclass(frozen=True)
class DraftConfig:
    """A drafter that fills a block in one pass: DFlash, DFlash2 (convolutions, a selector) or DSpark (a Markov head).

    Attributes:
        hidden_size: Width of the residual stream, that of the target.
        vocab_size: Tokens of the target's vocabulary.
        layers: Its layers.
        block_size: Places of a block: the last known token and the drafts.
        mask_token_id: Token at the places of the drafts.
        target_layer_ids: Layers of the target whose outputs, before any norm, are its features.
        num_target_layers: Layers of the target; None where the config does not say.
        norm_eps: Epsilon of every RMSNorm.
        max_positions: Positions of its context.
        own_embedding: Whether it has an embedding of its own, which its tensors tell; else it uses the target's.
        own_head: The same of its head.
        own_mask: Whether a learned embedding, which is no row of the table, stands at the places of the drafts.
        draft_vocab_size: Tokens that its head has, its own or the target's rows for them; None for all.
        is_shifted: Whether a place drafts the token after it, in place of the token at it. Then the last known token's
            place drafts, too, and blocks are always computed in their trained size.
        conv: Convolutions around the sublayers; None for none.
        selector: What chooses drafts from candidates; None: each place takes its own best token.
        confidence: What a head for the probability of each draft reads: its "state", or "state and token", the state
            and the token before it; None without such a head.
        output_multiplier: Factor of the logits.
        logit_cap: Logits x become cap · tanh(x / cap); 0 for no cap.
        embedding_scale: Factor of the block's embeddings.
        acceptance_rates: Of rounds of its block size, the share that was measured to accept draft 1, draft 2, …; None
            where there is no record. Two configs that differ only here are equal.
    """

    hidden_size: int
    vocab_size: int
    layers: tuple[DraftLayerSpec, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    norm_eps: float
    max_positions: int
    own_embedding: bool = False
    own_head: bool = False
    own_mask: bool = False
    draft_vocab_size: int | None = None
    is_shifted: bool = False
    conv: ConvSpec | None = None
    selector: SelectorSpec | None = None
    confidence: Literal["state", "state and token"] | None = None
    output_multiplier: float = 1.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    acceptance_rates: tuple[float, ...] | None = field(default=None, compare=False)

    def passes(self, block_size: int) -> tuple[int, int]:
        """(passes of the drafter, tokens of each sequence in each pass) of a round of ``block_size``."""
        return 1, self.block_size - 1 if self.is_shifted else block_size

    def check_fits(self, target: ModelConfig) -> None:
        """Checks that this drafter can be one for ``target``.

        Raises:
            InputError: Sizes, vocabulary, layers or the mask token do not fit.
        """
        check_sizes(self.hidden_size, self.vocab_size, self.num_target_layers, target)
        check_taps(self.target_layer_ids, target)
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise InputError(
                f"the drafter's mask_token_id {self.mask_token_id} is out of vocabulary: ids are 0 to "
                f"{target.vocab_size - 1}"
            )


def check_taps(taps: Sequence[int], target: ModelConfig) -> None:
    """Raises InputError where a drafter taps layers that ``target`` has not."""
    depth = len(target.layers)
    if outside := [i for i in taps if not 0 <= i < depth]:
        raise InputError(f"the drafter taps target layers {outside}, the target's layers are 0 to {depth - 1}")


def check_sizes(hidden_size: int, vocab_size: int, num_target_layers: int | None, target: ModelConfig) -> None:
    """Checks a drafter's hidden size, vocabulary and number of target layers.

    Raises:
        InputError: One is not that of ``target``.
    """
    if hidden_size != target.hidden_size:
        raise InputError(
            f"the drafter's hidden size is {hidden_size}, the target's is {target.hidden_size}: they differ"
        )
    if vocab_size != target.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {vocab_size} tokens, the target's {target.vocab_size}: they differ"
        )
    depth = len(target.layers)
    if num_target_layers not in (None, depth):
        raise InputError(f"the drafter is for a target of {num_target_layers} layers, this target has {depth}")
