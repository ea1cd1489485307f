"""Keys of a config.json: read, without effect, or refused by name."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models import families
from dflash_jax.models.families import dflash, mtp
from dflash_jax.models.families.reading import NEUTRAL, WITHOUT_EFFECT

CONFIGS = {path.stem: json.loads(path.read_text()) for path in Path("configs/hf").glob("*.json")}
CONFIGS |= {f"tiny {kind}": json.loads((TINY / kind / "config.json").read_text()) for kind in ("target", "draft")}
HYBRIDS = [name for name, raw in CONFIGS.items() if raw["model_type"].startswith(("qwen3_5", "qwen3_next"))]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def read(raw: dict):
    """What the config says: a drafter's, or a target's with its MTP head's where the kind has one."""
    if dflash.is_drafter(raw):
        return dflash.read_config(raw)
    target = families.read_target(raw)
    return (target, mtp.read_config(raw, target)) if families.target_family(raw) in mtp.FAMILIES else target


def sections(raw: dict, path=()) -> list[tuple[str, ...]]:
    """The paths of all objects in a config that hold keys of a model; the whole is ()."""
    inner = [key for key, value in raw.items() if isinstance(value, dict) and key != "quantization_config"]
    return [path, *(p for key in inner for p in sections(raw[key], (*path, key)))]


def put(raw: dict, path: tuple[str, ...], **keys) -> dict:
    if not path:
        return raw | keys
    return raw | {path[0]: put(raw[path[0]], path[1:], **keys)}


PLACES = [(name, path) for name, raw in CONFIGS.items() for path in sections(raw)]
# Without the underscores of the long keys that are known.
UNKNOWN = st.text(string.ascii_lowercase, min_size=15, max_size=25)
VALUES = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(0, 2), st.just("sigmoid"), st.just({}), st.just([]))


@given(st.sampled_from(PLACES), UNKNOWN, VALUES)
def test_an_unknown_key_is_refused_by_name_wherever_it_is(place, key, value):
    name, path = place
    with pytest.raises(InputError, match=key) as error:
        read(put(CONFIGS[name], path, **{key: value}))
    assert "\n" not in str(error.value)
    if path != ("dflash_config",):
        assert read(put(CONFIGS[name], path, **{key: None})) == read(CONFIGS[name])


def without_rope(place) -> bool:
    return not place[1] or not place[1][-1].startswith(("rope_", "dflash_config"))


@given(
    st.sampled_from(list(filter(without_rope, PLACES))),
    st.sampled_from([*sorted(WITHOUT_EFFECT - {"model_type", "architectures"}), "_attn_implementation", "x_token_id"]),
    VALUES,
)
def test_a_key_without_effect_changes_nothing(place, key, value):
    name, path = place
    raw = put(CONFIGS[name], path, **{key: value})
    assert read(raw) == read(CONFIGS[name])


@given(st.sampled_from(list(filter(without_rope, PLACES))), st.sampled_from(sorted(NEUTRAL)), VALUES)
def test_an_unsupported_key_is_accepted_at_its_neutral_value_only(place, key, value):
    name, path = place
    for neutral in NEUTRAL[key]:
        assert read(put(CONFIGS[name], path, **{key: neutral})) == read(CONFIGS[name])
    if value not in NEUTRAL[key]:
        with pytest.raises(InputError, match=f"{key} is .*it changes the numbers, and only {NEUTRAL[key][0]!r}"):
            read(put(CONFIGS[name], path, **{key: value}))


@pytest.mark.parametrize("name", HYBRIDS)
def test_gate_of_a_hybrid_is_silu(name):
    """vLLM computes what `output_gate_type` says in Gated DeltaNet's norm; transformers always computes SiLU."""
    path = ("text_config",) if "text_config" in CONFIGS[name] else ()
    for known in ("silu", "swish", None):
        assert read(put(CONFIGS[name], path, output_gate_type=known)) == read(CONFIGS[name])
    for key, value in (("output_gate_type", "sigmoid"), ("attn_output_gate", False), ("use_qk_norm", False)):
        with pytest.raises(InputError, match=f"{key} is {value!r}: it changes the numbers"):
            read(put(CONFIGS[name], path, **{key: value}))


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-Coder-30B-A3B", "tiny target", "Qwen3-8B-DFlash-b16"])
def test_windows_that_no_layer_has(name):
    for off in ({"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}):
        assert read(CONFIGS[name] | off) == read(CONFIGS[name])
    unnamed = {key: value for key, value in CONFIGS[name].items() if key != "use_sliding_window"}
    for on in ({"sliding_window": 4096}, {"sliding_window": 4096, "use_sliding_window": True}):
        raw = unnamed
        if dflash.is_drafter(raw):
            # A drafter that names its layers has the windows of these.
            assert read(raw | on) == read(CONFIGS[name])
            raw = raw | {"layer_types": None}
        with pytest.raises(InputError, match=r"sliding_window is .*it changes the numbers"):
            read(raw | on)


@pytest.mark.parametrize(
    ("name", "path", "keys", "says"),
    [
        ("Qwen3-Coder-30B-A3B", (), {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': .*'softmax'"),
        ("Qwen3-Coder-30B-A3B", (), {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5: .*only 1"),
        ("Qwen3-8B", (), {"use_qk_norm": False}, "use_qk_norm is False: .*only True"),
        ("Qwen3.6-27B", ("text_config",), {"sliding_window": 8}, "sliding_window is 8"),
        ("Qwen3.6-27B", (), {"hidden_size": 64}, "hidden_size is 64"),
        ("Qwen3.6-35B-A3B", ("text_config",), {"norm_topk_prob": False}, "text_config.norm_topk_prob is False"),
        ("Qwen3.6-27B", ("text_config", "rope_parameters"), {"mrope_interleaved": False}, "mrope_interleaved is False"),
        ("Qwen3-8B", (), {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.factor is 4.0"),
        ("Qwen3.6-27B-DFlash", (), {"draft_vocab_size": 250000}, "draft_vocab_size is 250000: vocab_size is 248320"),
    ],
)
def test_what_changes_the_numbers_is_refused(name, path, keys, says):
    with pytest.raises(InputError, match=says):
        read(put(CONFIGS[name], path, **keys))


def test_a_key_of_the_text_may_be_repeated_above_it():
    raw = CONFIGS["Qwen3.6-27B"]
    assert read(raw | {key: raw["text_config"][key] for key in ("hidden_size", "layer_types")}) == read(raw)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_length_under_yarn_is_its_factor_times_the_original(key):
    """As vLLM and transformers count it, whatever max_position_embeddings is."""
    raw = CONFIGS["Qwen3-8B"] | {key: YARN}
    assert (read(CONFIGS["Qwen3-8B"]).max_positions, read(raw).max_positions) == (40960, 131072)
    assert read(raw | {"max_position_embeddings": 131072}).max_positions == 131072
    implied = {name: value for name, value in YARN.items() if not name.startswith("original")}
    assert read(raw | {key: implied}).max_positions == 4 * 40960
    hybrid = put(CONFIGS["Qwen3.6-27B"], ("text_config", "rope_parameters"), **YARN | {"factor": 32.0})
    assert read(hybrid)[0].max_positions == 2**20
    with pytest.raises(InputError, match="under YaRN is"):
        read(raw | {key: YARN | {"factor": 1e6}})
