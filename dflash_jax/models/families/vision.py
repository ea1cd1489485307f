"""The vision tower of Qwen3.5 and Qwen3.6: its config and its weight names."""

import math
from collections.abc import Iterable

from dflash_jax.errors import InputError
from dflash_jax.models.config import MediaTokens, VisionConfig
from dflash_jax.models.families.names import Entry, same
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


def read_vision(raw: dict) -> VisionConfig | None:
    """Reads ``vision_config`` of a ``config.json``.

    Returns:
        The tower's configuration; None where there is none, or an empty one.

    Raises:
        InputError: A value is invalid, or the tower is of another kind.
    """
    tower = Raw(Raw(raw).section("vision_config"), "vision_config")
    if not tower:
        return None
    _refuse_other_towers(tower)
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
        rope_theta=Raw(tower.section("rope_parameters")).number("rope_theta", 10000.0, 1.0 + 1e-6, 1e15),
    )
    # Half of a head's frequencies follow the row and half the column, and each turns two dimensions.
    if config.hidden_size % config.num_heads or config.head_dim % 4:
        raise InputError(
            f"the vision tower's hidden_size is {config.hidden_size} and num_heads {config.num_heads}: a head must "
            f"have a multiple of four dimensions"
        )
    if config.side**2 != config.num_positions:
        raise InputError(f"num_position_embeddings is {config.num_positions}: it must be the square of a whole number")
    return config


def _refuse_other_towers(tower: Raw) -> None:
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
        ("rope_type", tower.section("rope_parameters").get("rope_type"), "axial"),
    ):
        if value not in (None, known):
            raise InputError(f"the vision tower's {key} is {shown(value)}: only {known} is known")


def read_media_tokens(raw: dict) -> MediaTokens:
    """Reads the ids that place media in a prompt.

    Raises:
        InputError: One is no token id.
    """
    return MediaTokens(*(Raw(raw).integer(key, default, 0) for key, default in TOKENS.items()))


def vision_prefix(names: Iterable[str]) -> str | None:
    """The prefix of the tower's tensors among ``names``; None where there are none."""
    return next((prefix for name in names for prefix in PREFIXES if name.startswith(prefix)), None)


def vision_entries(config: VisionConfig, prefix: str = PREFIXES[0]) -> list[Entry]:
    """The table of a tower whose tensors on disk have ``prefix``."""
    hidden, heads, mlp, merged = config.hidden_size, config.num_heads, config.intermediate_size, config.merged_size
    entries: list[Entry] = []

    def linear(path: str, name: str, out: tuple[int, ...], inner: tuple[int, ...], disk: tuple[int, ...] = ()) -> None:
        disk = disk or (math.prod(out), math.prod(inner))
        entries.append(same(f"{path}.weight", (*out, *inner), f"{prefix}{name}.weight", disk))
        entries.append(same(f"{path}.bias", out, f"{prefix}{name}.bias", (math.prod(out),)))

    def norm(path: str, name: str) -> None:
        entries.extend(same(f"{path}.{part}", (hidden,), f"{prefix}{name}.{part}") for part in ("weight", "bias"))

    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    # A convolution whose stride is its kernel is a product with the flat patch.
    linear("patch", "patch_embed.proj", (hidden,), (config.patch_dim,), (hidden, *patch))
    entries.append(same("positions", (config.num_positions, hidden), f"{prefix}pos_embed.weight"))
    for i in range(config.depth):
        path = name = f"blocks.{i}."
        norm(f"{path}norm1", f"{name}norm1")
        norm(f"{path}norm2", f"{name}norm2")
        linear(f"{path}qkv", f"{name}attn.qkv", (3, heads, config.head_dim), (hidden,))
        linear(f"{path}proj", f"{name}attn.proj", (hidden,), (heads, config.head_dim))
        linear(f"{path}fc1", f"{name}mlp.linear_fc1", (mlp,), (hidden,))
        linear(f"{path}fc2", f"{name}mlp.linear_fc2", (hidden,), (mlp,))
    norm("merger.norm", "merger.norm")
    linear("merger.fc1", "merger.linear_fc1", (merged,), (merged,))
    linear("merger.fc2", "merger.linear_fc2", (config.out_hidden_size,), (merged,))
    return entries
