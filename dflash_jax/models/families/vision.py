"""The vision tower of Qwen3.5 and Qwen3.6: its config and its weight names."""

import math
from collections.abc import Iterable

from dflash_jax.errors import InputError
from dflash_jax.models.config import MediaTokens, VisionConfig
from dflash_jax.models.families.names import Entry, Tensor, same, stacked
from dflash_jax.models.families.reading import Raw, shown

# The first is transformers'; some exports have the second.
PREFIXES = ("model.visual.", "visual.")
# Old checkpoints name the whole model's type.
MODEL_TYPES = (None, "qwen3_5_vision", "qwen3_5_moe_vision", "qwen3_5", "qwen3_5_moe")
# transformers' defaults, which are those of every published checkpoint.
TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def read_vision(raw: Raw) -> VisionConfig | None:
    """Reads ``vision_config`` of a ``config.json``.

    Returns:
        The tower's configuration; None where there is none, or an empty one.

    Raises:
        InputError: A value is invalid, or the tower is of another kind.
    """
    tower = Raw(raw.section("vision_config"), "vision_config")
    if not tower:
        return None
    rope = Raw(tower.section("rope_parameters"), "vision_config")
    _refuse_other_towers(tower, rope)
    config = VisionConfig(
        depth=tower.need("depth"),
        hidden_size=tower.need("hidden_size"),
        num_heads=tower.need("num_heads"),
        intermediate_size=tower.need("intermediate_size"),
        patch_size=tower.need("patch_size"),
        temporal_patch_size=tower.integer("temporal_patch_size", 2),
        merge_size=tower.integer("spatial_merge_size", 2),
        in_channels=tower.integer("in_channels", 3),
        num_positions=tower.need("num_position_embeddings"),
        out_hidden_size=tower.need("out_hidden_size"),
        rope_theta=rope.number("rope_theta", 10000.0, 1.0 + 1e-6, 1e15),
    )
    tower.refuse_unread(lambda key: f"vision_config.{key}")
    rope.refuse_unread(lambda key: f"vision_config.rope_parameters.{key}")
    # Half of a head's frequencies follow the row and half the column, and each turns two dimensions.
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        raise InputError(
            f"the vision tower's hidden_size is {config.hidden_size} and num_heads {config.num_heads}: a head must "
            f"have a multiple of four dimensions"
        )
    if config.side**2 != config.num_positions:
        raise InputError(f"num_position_embeddings is {config.num_positions}: it must be the square of a whole number")
    return config


def _refuse_other_towers(tower: Raw, rope: Raw) -> None:
    kind = tower.get("model_type")
    if not (kind is None or isinstance(kind, str)) or kind not in MODEL_TYPES:
        known = ", ".join(filter(None, MODEL_TYPES))
        raise InputError(f"the vision tower's model_type is {shown(kind)}: known are {known}")
    if tower.get("deepstack_visual_indexes"):
        raise InputError(
            f"deepstack_visual_indexes is {shown(tower['deepstack_visual_indexes'])}: only towers without are known"
        )
    for key, value, known in (
        ("hidden_act", tower.get("hidden_act"), "gelu_pytorch_tanh"),
        ("rope_type", rope.get("rope_type"), "axial"),
    ):
        if value not in (None, known):
            raise InputError(f"the vision tower's {key} is {shown(value)}: only {known} is known")


def read_media_tokens(raw: Raw) -> MediaTokens:
    """Reads the ids that place media in a prompt.

    Raises:
        InputError: One is no token id.
    """
    return MediaTokens(*(raw.integer(key, default, 0) for key, default in TOKENS.items()))


def vision_prefix(names: Iterable[str]) -> str | None:
    """The prefix of the tower's tensors among ``names``; None where there are none."""
    return next((prefix for name in names for prefix in PREFIXES if name.startswith(prefix)), None)


def vision_entries(config: VisionConfig, prefix: str = PREFIXES[0]) -> list[Entry]:
    """The table of a tower whose tensors on disk have ``prefix``. Blocks are tensors of their own there."""
    hidden, heads, mlp, merged = config.hidden_size, config.num_heads, config.intermediate_size, config.merged_size
    entries: list[Entry] = []

    def add(path: str, name: str, shape: tuple[int, ...], disk: tuple[int, ...]) -> None:
        if not path.startswith("blocks."):
            entries.append(same(path, shape, f"{prefix}{name}", disk))
            return
        tensors = [Tensor(f"{prefix}blocks.{i}.{name}", disk) for i in range(config.depth)]
        entries.append(stacked(path, (config.depth, *shape), tensors))

    def linear(path: str, name: str, out: tuple[int, ...], inner: tuple[int, ...], disk: tuple[int, ...] = ()) -> None:
        add(f"{path}.weight", f"{name}.weight", (*out, *inner), disk or (math.prod(out), math.prod(inner)))
        add(f"{path}.bias", f"{name}.bias", out, (math.prod(out),))

    def norm(path: str, name: str) -> None:
        for part in ("weight", "bias"):
            add(f"{path}.{part}", f"{name}.{part}", (hidden,), (hidden,))

    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    # A convolution whose stride is its kernel is a product with the flat patch.
    linear("patch", "patch_embed.proj", (hidden,), (config.patch_dim,), (hidden, *patch))
    add("positions", "pos_embed.weight", (config.num_positions, hidden), (config.num_positions, hidden))
    norm("blocks.norm1", "norm1")
    norm("blocks.norm2", "norm2")
    linear("blocks.qkv", "attn.qkv", (3, heads, config.head_dim), (hidden,))
    linear("blocks.proj", "attn.proj", (hidden,), (heads, config.head_dim))
    linear("blocks.fc1", "mlp.linear_fc1", (mlp,), (hidden,))
    linear("blocks.fc2", "mlp.linear_fc2", (hidden,), (mlp,))
    norm("merger.norm", "merger.norm")
    linear("merger.fc1", "merger.linear_fc1", (merged,), (merged,))
    linear("merger.fc2", "merger.linear_fc2", (config.out_hidden_size,), (merged,))
    return entries
