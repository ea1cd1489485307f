"""The vision tower of Qwen3.5 and Qwen3.6: its tensors on disk, which are counted and carried, not run."""


def vision_tensors(raw: dict) -> dict[str, tuple[int, ...]]:
    """Name (behind ``model.visual.``) → shape, from ``vision_config``."""
    hidden, mlp, merge = (
        raw["hidden_size"],
        raw["intermediate_size"],
        raw.get("spatial_merge_size", 2) ** 2 * raw["hidden_size"],
    )
    patch = (raw.get("in_channels", 3), raw.get("temporal_patch_size", 2), raw["patch_size"], raw["patch_size"])

    def linear(name: str, out: int, inner: int) -> dict:
        return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}

    def norm(name: str) -> dict:
        return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}

    tensors = {"patch_embed.proj.weight": (hidden, *patch), "patch_embed.proj.bias": (hidden,)}
    tensors["pos_embed.weight"] = (raw["num_position_embeddings"], hidden)
    for i in range(raw["depth"]):
        at = f"blocks.{i}."
        tensors |= norm(f"{at}norm1") | norm(f"{at}norm2")
        tensors |= linear(f"{at}attn.qkv", 3 * hidden, hidden) | linear(f"{at}attn.proj", hidden, hidden)
        tensors |= linear(f"{at}mlp.linear_fc1", mlp, hidden) | linear(f"{at}mlp.linear_fc2", hidden, mlp)
    tensors |= norm("merger.norm") | linear("merger.linear_fc1", merge, merge)
    return tensors | linear("merger.linear_fc2", raw["out_hidden_size"], merge)
