"""The vision tower of Qwen3.5 and Qwen3.6: its tensors are counted and converted, but not run."""

from dflash_jax.models.families.reading import Raw


def vision_tensors(raw: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the tower's tensors by name (behind ``model.visual.``); none for an empty ``vision_config``."""
    if not raw:
        return {}
    raw = Raw(raw, "vision_config")
    hidden, mlp = raw.need("hidden_size"), raw.need("intermediate_size")
    merge = raw.integer("spatial_merge_size", 2) ** 2 * hidden
    size = raw.need("patch_size")
    patch = (raw.integer("in_channels", 3), raw.integer("temporal_patch_size", 2), size, size)

    def linear(name: str, out: int, inner: int) -> dict:
        return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}

    def norm(name: str) -> dict:
        return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}

    tensors = {"patch_embed.proj.weight": (hidden, *patch), "patch_embed.proj.bias": (hidden,)}
    tensors["pos_embed.weight"] = (raw.need("num_position_embeddings"), hidden)
    for i in range(raw.need("depth")):
        at = f"blocks.{i}."
        tensors |= norm(f"{at}norm1") | norm(f"{at}norm2")
        tensors |= linear(f"{at}attn.qkv", 3 * hidden, hidden) | linear(f"{at}attn.proj", hidden, hidden)
        tensors |= linear(f"{at}mlp.linear_fc1", mlp, hidden) | linear(f"{at}mlp.linear_fc2", hidden, mlp)
    tensors |= norm("merger.norm") | linear("merger.linear_fc1", merge, merge)
    return tensors | linear("merger.linear_fc2", raw.need("out_hidden_size"), merge)
