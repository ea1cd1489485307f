"""Float32 parity of the vision tower with transformers, from checkpoints that transformers wrote."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from dflash_jax.checkpoint.load import load_tower, read_target_config
from dflash_jax.frontend.loading import packed
from dflash_jax.models.vision import frame_arrays
from tests.float64 import Exact, assert_near, double_of, doubled
from tests.helpers import whole_pass
from tests.parity.oracle import randomise
from tests.parity.test_qwen3_5 import COMMON, DENSE, MOE
from tools.float64_reference import distances

VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": COMMON["hidden_size"],
    "num_position_embeddings": 36,
}
TOKENS = {"image_token_id": 91, "video_token_id": 92, "vision_start_token_id": 93, "vision_end_token_id": 94}
FAMILIES = {
    "dense": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, DENSE),
    "moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, MOE),
}
# (frames, rows, columns) of each medium, in patches.
GRIDS = {
    "one_block": [(1, 2, 2)],
    "one_image": [(1, 6, 10)],
    "long_image": [(1, 2, 40)],
    # Finer than the table of positions, and more than one tile of scores.
    "large_image": [(1, 18, 22)],
    "several_images": [(1, 4, 6), (1, 10, 2), (1, 4, 6)],
    "one_video": [(3, 4, 6)],
    "video_between_images": [(1, 6, 6), (4, 2, 8), (1, 2, 2)],
}


@functools.cache
def model(family: str):
    kind, config, text = FAMILIES[family]
    return randomise(kind(config(text_config=text, vision_config=VISION, **TOKENS)), 11, offset=0.0)


@pytest.fixture(scope="session")
def towers(tmp_path_factory):
    towers = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        model(family).save_pretrained(path)
        # The weights of one family are packed, where there are kernels.
        towers[family] = packed(load_tower(path), "float32" if family == "moe" else "bfloat16")
        assert read_target_config(path).vision == towers[family].config
    return towers


def encode_by_transformers(tower, patches: np.ndarray, grids: list) -> np.ndarray:
    with torch.no_grad():
        dtype = tower.pos_embed.weight.dtype
        out = tower(torch.as_tensor(patches, dtype=dtype), grid_thw=torch.as_tensor(grids))
    return out.pooler_output.to(torch.promote_types(dtype, torch.float32)).numpy()


def expected(tower, patches: np.ndarray, grids: list) -> Exact:
    single = encode_by_transformers(tower, patches, grids)
    with doubled():
        double = encode_by_transformers(double_of(tower), patches, grids)
    assert double.dtype == np.float64
    return Exact(double, single)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_grid_equal_transformers(family, name, towers):
    grids = GRIDS[name]
    total = sum(t * h * w for t, h, w in grids)
    patches = np.random.default_rng(total).standard_normal((total, 3 * 2 * 4 * 4)).astype(np.float32)
    want = expected(model(family).model.visual, patches, grids)
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    got = np.asarray(whole_pass(towers[family], patches, **frame_arrays(frames, total, 2)))
    assert_near(got, want, name)
    assert np.abs(got - want.value).max() < 1e-5
    assert 0.3 < want.value.std() < 10, "the random tower says too little or too much"


def test_rows_in_bfloat16_are_as_near_to_float64_as_transformers(towers):
    """Weights and patches are rounded before, so that the reference in float64 starts from the same numbers."""
    reference = copy.deepcopy(model("dense").model.visual).to(torch.bfloat16)
    tower = jax.tree.map(lambda x: x.astype(jnp.bfloat16), towers["dense"])
    patches = np.random.default_rng(4).standard_normal((2 * 6 * 40, 3 * 2 * 4 * 4)).astype(jnp.bfloat16)
    want = expected(reference, patches.astype(np.float32), [(2, 6, 40)])
    got = whole_pass(tower, patches.astype(np.float32), **frame_arrays([(6, 40)] * 2, len(patches), 2))
    assert got.dtype == jnp.bfloat16
    for name, (apart, allowed) in distances(got, want, jnp.bfloat16).items():
        assert apart <= allowed, name
