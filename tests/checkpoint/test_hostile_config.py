"""Hostile values at every key of every family's config.json: an InputError that names file and key, or a model."""

import json
import resource
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dflash_jax.checkpoint.load import read_draft_config
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.models import families
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.models.families.vision import vision_entries
from dflash_jax.models.vision import abstract_tower
from dflash_jax.planner import read_shapes

CONFIGS = Path(__file__).parents[2] / "configs" / "hf"
LAYERS = 2
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def deep(levels: int):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


VALUES = (
    *(None, True, False, {}, [], [None], [1, 2, 3], ["x"], {"x": [1]}, "x", "", "8", "x" * 100_000, deep(400)),
    *(-1, 0, 1, 3, 8, 0.5, -0.5, 1e400, float("nan"), 1e-320, 1e300, 1e15, 10**400),
    # Within some key's range: nothing may grow with it but a list of names.
    *(1024, 2**12, 2**14, 2**17, 2**20, 2**22, 2**30, 2**31, 2**63),
)


def cut(raw: dict, **changes) -> dict:
    """A published config with few layers."""
    text = raw.get("text_config", raw)
    text["num_hidden_layers"] = LAYERS
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:LAYERS]
    if "vision_config" in raw:
        raw["vision_config"] |= {"depth": LAYERS, "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
    return {**raw, **changes}


def published(name: str, **changes) -> dict:
    return cut(json.loads((CONFIGS / f"{name}.json").read_text()), **changes)


TARGETS = {
    "qwen3_5_moe": published("Qwen3.6-35B-A3B-FP8"),
    "qwen3_5": published("Qwen3.6-27B", tie_word_embeddings=False),
    "qwen3_5_text": json.loads((TINY / "target" / "config.json").read_text()),
    "qwen3_next": published("Qwen3-Coder-Next", norm_topk_prob=True, mlp_only_layers=[0], decoder_sparse_step=1),
    "qwen3_moe": published("Qwen3-Coder-30B-A3B", num_local_experts=None, rope_scaling=YARN),
    "qwen3": published("Qwen3-8B"),
    "llama": published("Qwen3-8B", model_type="llama", rope_scaling=LLAMA3),
}
FLAGS = {"is_causal": None, "causal": None, "causal_head": True, "use_swa": False, "swa_window_size": 7}
DRAFTERS = {
    "jetspec": published("Qwen3-8B-DFlash-b16"),
    "sliding": published("Qwen3.6-27B-DFlash", num_hidden_layers=LAYERS),
    "yarn": published("Qwen3.6-35B-A3B-DFlash-8-layer"),
}
DRAFTERS["jetspec"]["dflash_config"] |= FLAGS


def places(value, path=()):
    """The paths of all values in a config, inner ones and first elements of lists included."""
    if isinstance(value, dict):
        for key in value:
            yield (*path, key)
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield (*path, 0)


def put(raw, path, value):
    """A copy of ``raw`` with ``value`` at ``path``; without the key where ``value`` is ..."""
    if not path:
        return value
    copy = list(raw) if isinstance(raw, list) else dict(raw)
    if value is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = put(raw[path[0]], path[1:], value)
    return copy


def changed(raw):
    """(path, the config as JSON) for every place and hostile value."""
    for path in places(raw):
        for value in (*VALUES, ...):
            yield path, value, json.dumps(put(raw, path, value))


@cache
def shape(config) -> None:
    """Names and shapes of everything that a config stands for."""
    if isinstance(config, DraftConfig):
        dflash.weight_names(config)
        abstract_drafter(config)
    else:
        families.TARGETS[config.model_type].weight_names(config)
        abstract_decoder(replace(config, vision=None))
        if config.vision:
            vision_entries(config.vision)
            abstract_tower(config.vision)


def open_as_target(directory: Path):
    shape(read_shapes(str(directory), None).target)
    SamplingDefaults.read(directory)


def open_as_drafter(directory: Path):
    shape(read_draft_config(directory))


def check(raw: dict, directory: Path, read) -> None:
    file, models, refused = directory / "config.json", 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path, value, text in changed(raw):
        file.write_text(text)
        try:
            read(directory)
            models += 1
        except InputError as e:
            message = str(e.args[0])
            assert str(directory) in message, message
            assert len(message) < 1000
            refused += 1
        except BaseException as e:
            raise AssertionError(f"{path} = {str(value)[:60]}: {type(e).__name__}: {e}") from e
        # In KB: names and shapes of a thousand layers fit, an array of what a config claims would not.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, (path, str(value)[:60])
    assert models > 100 < refused


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_target_config_gives_an_input_error_or_a_model(name, tmp_path):
    check(TARGETS[name], tmp_path, open_as_target)


@pytest.mark.parametrize("name", DRAFTERS)
def test_hostile_drafter_config_gives_an_input_error_or_a_model(name, tmp_path):
    check(DRAFTERS[name], tmp_path, open_as_drafter)
