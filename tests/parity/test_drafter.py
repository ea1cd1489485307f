"""The drafter against its restatement in `dflash_reference`, and every published config read and counted."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.checkpoint.load import load_drafter
from dflash_jax.errors import InputError
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.drafting import ContextTokens, DraftWindow, TargetHeads
from dflash_jax.models.families import dflash
from tests.float64 import Exact, assert_near, shaken
from tests.helpers import draw, map_numbers
from tests.parity import dflash_reference

HIDDEN, TAPS, VOCAB, SLOTS = 24, 2, 53, 16
CONFIGS = Path(__file__).parents[2] / "configs" / "hf"
FULL, SLIDING = "full_attention", "sliding_attention"

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 1000.0,
    "max_position_embeddings": 2048,
    "num_target_layers": 5,
    "block_size": SLOTS,
    "dflash_config": {"mask_token_id": 51, "target_layer_ids": [3, 1]},
}


def config(**changes) -> dict:
    """BASE with changes; those of ``dflash_config`` are added to what it has."""
    own = {**BASE["dflash_config"], **changes.pop("dflash_config", {})}
    return {**BASE, **changes, "dflash_config": own}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0}

# name: (config, draft window, which (window, causal) each layer must come out with)
CASES = {
    "full": (config(layer_types=[FULL, FULL]), DraftWindow(), [(None, False)] * 2),
    "no_layer_types": (config(sliding_window=5, use_sliding_window=False), DraftWindow(), [(None, False)] * 2),
    "sliding_is_causal": (
        config(layer_types=[SLIDING, FULL], sliding_window=7),
        DraftWindow(),
        [(7, True), (None, False)],
    ),
    # Hugging Face's Qwen3Config would drop the window: use_sliding_window is not set.
    "sliding_not_causal": (
        config(layer_types=[FULL, SLIDING], sliding_window=5, is_causal=False, use_sliding_window=False),
        DraftWindow(),
        [(None, False), (5, False)],
    ),
    "is_causal_wins": (
        config(layer_types=[FULL, SLIDING], sliding_window=9, is_causal=True, dflash_config={"causal": False}),
        DraftWindow(),
        [(None, True), (9, True)],
    ),
    "own_causal": (
        config(layer_types=[FULL, SLIDING], sliding_window=9, is_causal=None, dflash_config={"causal": True}),
        DraftWindow(),
        [(None, True), (9, True)],
    ),
    "own_not_causal": (
        config(layer_types=[FULL, SLIDING], sliding_window=4, dflash_config={"causal": False}),
        DraftWindow(),
        [(None, False), (4, False)],
    ),
    "causal_head": (
        config(layer_types=[FULL, FULL], dflash_config={"causal_head": True}),
        DraftWindow(),
        [(None, True)] * 2,
    ),
    "causal_head_at_top": (
        config(layer_types=[FULL, SLIDING], sliding_window=6, causal_head=True),
        DraftWindow(12, 2),
        [(None, True), (6, True)],
    ),
    "causal_head_that_is_off": (
        config(layer_types=[FULL, SLIDING], sliding_window=11, dflash_config={"causal_head": False}),
        DraftWindow(),
        [(None, False), (11, False)],
    ),
    "causal_wins_over_causal_head": (
        config(layer_types=[FULL, SLIDING], sliding_window=13, dflash_config={"causal": False, "causal_head": True}),
        DraftWindow(),
        [(None, False), (13, False)],
    ),
    "is_causal_wins_over_causal_head": (
        config(layer_types=[FULL, SLIDING], sliding_window=14, is_causal=False, dflash_config={"causal_head": True}),
        DraftWindow(),
        [(None, False), (14, False)],
    ),
    "use_swa": (
        config(sliding_window=30, dflash_config={"use_swa": True, "swa_window_size": 6}),
        DraftWindow(),
        [(6, True)] * 2,
    ),
    "use_swa_with_layer_types": (
        config(layer_types=[FULL, SLIDING], sliding_window=8, dflash_config={"use_swa": True}),
        DraftWindow(),
        [(None, False), (8, True)],
    ),
    "use_swa_where_none_slides": (
        config(layer_types=[FULL, FULL], sliding_window=8, dflash_config={"use_swa": True, "causal": False}),
        DraftWindow(),
        [(8, False)] * 2,
    ),
    "yarn_and_head_dim_from_hidden": (
        config(layer_types=[SLIDING, FULL], sliding_window=11, rope_scaling=YARN, head_dim=None),
        DraftWindow(),
        [(11, True), (None, False)],
    ),
    "draft_window": (config(layer_types=[FULL, FULL]), DraftWindow(9), [(None, False)] * 2),
    "draft_window_and_sinks": (
        config(layer_types=[FULL, SLIDING], sliding_window=20, is_causal=False),
        DraftWindow(9, 3),
        [(None, False), (20, False)],
    ),
    "narrow_layers_under_sinks": (
        config(layer_types=[SLIDING, FULL], sliding_window=6),
        DraftWindow(15, 4),
        [(6, True), (None, False)],
    ),
}


def random_tensors(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    h, f, n, k = (raw[x] for x in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    d = raw.get("head_dim") or h // n
    shapes = {"fc.weight": (h, TAPS * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(raw["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (h,),
                "post_attention_layernorm": (h,),
                "self_attn.q_proj": (n * d, h),
                "self_attn.k_proj": (k * d, h),
                "self_attn.v_proj": (k * d, h),
                "self_attn.o_proj": (h, n * d),
                "self_attn.q_norm": (d,),
                "self_attn.k_norm": (d,),
                "mlp.gate_proj": (f, h),
                "mlp.up_proj": (f, h),
                "mlp.down_proj": (h, f),
            }.items()
        }
        if taps := dflash_reference.option(raw, "conv_kernel_size"):
            for side in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{side}.base_kernel"] = (2, taps, h)
                rows = 2 * taps * h // dflash_reference.option(raw, "conv_group_size")
                shapes[f"layers.{i}.{side}.kernel_projection.weight"] = (rows, h)
    if rank := dflash_reference.option(raw, "selector_rank"):
        shapes["candidate_selector.hidden_projection.weight"] = (rank, h)
        shapes |= {f"candidate_selector.{side}_codebook": (VOCAB, rank) for side in ("predecessor", "successor")}
    tensors = {name: draw(rng, name, shape, shape[-1]) for name, shape in shapes.items()}
    # Attention that picks and pairs that count, so that a wrong mask, position or predecessor shows.
    return {name: 1.6 * w if re.search("q_norm|k_norm|codebook", name) else w for name, w in tensors.items()}


def saved(raw: dict, path: Path, seed: int = 0, more: dict | None = None):
    """(drafter loaded from a checkpoint, tensors); ``more``: further tensors."""
    tensors = random_tensors(raw, seed) | (more or {})
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return load_drafter(path), tensors


extend = jax.jit(Drafter.extend)
block = partial(jax.jit, static_argnames=("window",))(Drafter.block)


def build_context(drafter, features, lengths, window, capacity, slots, rng):
    """Caches of rows of ``lengths``, extended in pieces of random sizes; what a piece does not keep is NaN."""
    rows = len(lengths)
    cache = drafter.init_cache(rows, capacity, jnp.float32, window)
    at = np.zeros(rows, np.int32)
    while (at < lengths).any():
        n = np.minimum(rng.integers(0, slots + 1, rows), lengths - at)
        piece = np.full((rows, slots, *features.shape[2:]), np.nan, np.float32)
        for row in range(rows):
            piece[row, : n[row]] = features[row, at[row] : at[row] + n[row]]
        steps = np.arange(slots)[None]
        positions = jnp.asarray(at[:, None] + steps)
        # A drafter of features reads no other inputs.
        ids, valid = jnp.zeros(positions.shape, jnp.int32), jnp.asarray(steps < n[:, None])
        cache = extend(
            drafter,
            cache,
            ContextTokens(ids, jnp.asarray(piece[:, :, 0]), jnp.asarray(piece), positions, positions, valid),
        )
        at += n.astype(np.int32)
    return cache


def reference_rows(raw, tensors, features, lengths, widths, embedded, window) -> list[Exact]:
    """The final hidden states of each row's block, by `dflash_reference`."""
    rng = np.random.default_rng(4)
    moved = {name: shaken(values, rng) for name, values in tensors.items()}

    def states(row, dtype, tensors, change=np.asarray):
        context, own = change(features[row, : lengths[row]]), change(embedded[row, : widths[row]])
        return dflash_reference.drafter(raw, tensors, context, own, window.size, window.sinks, dtype)

    return [
        Exact(
            states(row, np.float64, tensors),
            states(row, np.float32, tensors),
            states(row, np.float64, moved, lambda x: shaken(x, rng)),
        )
        for row in range(len(lengths))
    ]


# Every width from 1 to 16, behind contexts from nothing to many times around the rings.
WIDTHS = np.arange(1, SLOTS + 1, dtype=np.int32)
LENGTHS = np.asarray([77, 3, 0, 50, 9, 64, 1, 30, 90, 6, 23, 41, 12, 88, 7, 55], np.int32)
CAPACITY = 120


# Together they hold every kind of layer; each costs a compilation.
RUN = [
    "full",
    "sliding_is_causal",
    "sliding_not_causal",
    "is_causal_wins",
    "use_swa",
    "yarn_and_head_dim_from_hidden",
    "draft_window_and_sinks",
    "narrow_layers_under_sinks",
]


@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_config_have_window_and_causality_of_the_reference(name):
    raw, _, rules = CASES[name]
    assert [(s.window, s.causal) for s in dflash.read_config(raw).layers] == rules
    assert [dflash_reference.layer_rule(raw, i) for i in range(2)] == rules


@pytest.mark.parametrize("name", RUN)
def test_block_of_every_width_equals_the_reference(name, tmp_path):
    """All widths in one call of 16 slots, each equal to a block of exactly that width."""
    raw, window, _ = CASES[name]
    assert_blocks(raw, window, tmp_path)


def assert_blocks(raw: dict, window: DraftWindow, path: Path) -> None:
    """Checks blocks of all widths of a drafter, written to ``path``, against the reference."""
    drafter, tensors = saved(raw, path)
    rng = np.random.default_rng(1)
    features = rng.standard_normal((SLOTS, CAPACITY, TAPS, HIDDEN)).astype(np.float32)
    embedded = rng.standard_normal((SLOTS, SLOTS, HIDDEN)).astype(np.float32)
    cache = build_context(drafter, features, LENGTHS, window, CAPACITY, 13, rng)
    got = block(drafter, jnp.asarray(embedded), cache, jnp.asarray(LENGTHS), jnp.asarray(WIDTHS), window=window)
    for row, want in enumerate(reference_rows(raw, tensors, features, LENGTHS, WIDTHS, embedded, window)):
        assert_near(got[row, : WIDTHS[row]], want, f"width {WIDTHS[row]} after {LENGTHS[row]} positions")


def test_reference_gives_different_answers_for_different_rules(tmp_path):
    """The restatement itself tells the rules apart: no two cases with one shape of weights give one answer."""
    rng = np.random.default_rng(2)
    features, embedded = rng.standard_normal((40, TAPS, HIDDEN)), rng.standard_normal((9, HIDDEN))
    seen = {}
    for name, (raw, window, rules) in CASES.items():
        key = (tuple(rules), window, raw.get("head_dim"))
        seen[key] = dflash_reference.drafter(raw, random_tensors(raw), features, embedded, window.size, window.sinks)
        assert np.isfinite(seen[key]).all(), name
    for a in seen:
        for b in seen:
            assert a is b or np.abs(seen[a] - seen[b]).max() > 1e-2, (a, b)


def test_a_slot_of_a_causal_head_sees_none_behind_it(tmp_path):
    """What stands in later slots, and how many there are, does not reach a slot; in a bidirectional block it does."""
    rng = np.random.default_rng(6)
    features = rng.standard_normal((1, 30, TAPS, HIDDEN)).astype(np.float32)
    embedded = rng.standard_normal((1, SLOTS, HIDDEN)).astype(np.float32)
    other = embedded.copy()
    other[:, 6:] += 1
    for name, is_causal in (("causal_head", True), ("full", False)):
        raw, window, _ = CASES[name]
        (tmp_path / name).mkdir()
        drafter, _ = saved(raw, tmp_path / name)
        cache = build_context(drafter, features, np.asarray([30], np.int32), window, 64, 13, rng)
        run = partial(block, drafter, cache=cache, start=jnp.asarray([30]), window=window)
        wide = np.asarray(run(embedded, block_sizes=jnp.asarray([SLOTS])))[0, :6]
        for slots, width in ((other, SLOTS), (embedded, 6)):
            got = np.asarray(run(slots, block_sizes=jnp.asarray([width])))[0, :6]
            assert (np.abs(got - wide).max() < 1e-6) == is_causal


def test_block_behind_a_long_context_equals_the_reference(tmp_path):
    """Contexts of several pages, and a window of more than one."""
    raw, window = config(layer_types=[SLIDING, FULL], sliding_window=300), DraftWindow()
    drafter, tensors = saved(raw, tmp_path)
    lengths, widths = np.asarray([1100, 299, 700], np.int32), np.asarray([16, 5, 9], np.int32)
    rng = np.random.default_rng(3)
    features = rng.standard_normal((3, 1100, TAPS, HIDDEN)).astype(np.float32)
    embedded = rng.standard_normal((3, SLOTS, HIDDEN)).astype(np.float32)
    cache = build_context(drafter, features, lengths, window, 1200, 190, rng)
    assert [c.window for c in cache] == [300, None]
    got = block(drafter, jnp.asarray(embedded), cache, jnp.asarray(lengths), jnp.asarray(widths), window=window)
    for row, want in enumerate(reference_rows(raw, tensors, features, lengths, widths, embedded, window)):
        assert_near(got[row, : widths[row]], want, f"behind {lengths[row]} positions")


def test_a_cache_has_the_window_of_its_layer():
    def windows(raw, window):
        drafter = abstract_drafter(dflash.read_config(raw))
        cache = jax.eval_shape(lambda: drafter.init_cache(1, 100_000, jnp.float32, window))
        return [(c.window, c.sinks) for c in cache]

    mixed = config(layer_types=[SLIDING, FULL], sliding_window=7)
    assert windows(mixed, DraftWindow()) == [(7, 0), (None, 0)]
    assert windows(mixed, DraftWindow(40, 4)) == [(7, 4), (40, 4)]
    published = json.loads((CONFIGS / "Qwen3.6-27B-DFlash.json").read_text())
    assert windows(published, DraftWindow()) == [(2048, 0)] * 4 + [(None, 0)]


def test_an_idle_row_reaches_no_other(tmp_path):
    """NaN in the caches of one row: the others' blocks are the same to the bit."""
    raw, window, _ = CASES["sliding_is_causal"]
    drafter, _ = saved(raw, tmp_path)
    rng = np.random.default_rng(4)
    features = rng.standard_normal((SLOTS, CAPACITY, TAPS, HIDDEN)).astype(np.float32)
    embedded = jnp.asarray(rng.standard_normal((SLOTS, SLOTS, HIDDEN)), jnp.float32)
    cache = build_context(drafter, features, LENGTHS, window, CAPACITY, 13, rng)
    start = jnp.asarray(LENGTHS).at[3].set(0)
    args = (start, jnp.asarray(WIDTHS))
    clean = np.asarray(block(drafter, embedded, cache, *args, window=window))
    poisoned = map_numbers(lambda x: x.at[3].set(jnp.nan), cache)
    dirty = np.asarray(block(drafter, embedded, poisoned, *args, window=window))
    others = np.arange(SLOTS) != 3
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.mark.parametrize(
    ("own", "tied"),
    [
        ((), False),
        (("lm_head.weight",), False),
        (("embed_tokens.weight",), False),
        (("model.embed_tokens.weight", "lm_head.weight"), True),
        (("embed_tokens.weight",), True),
    ],
)
def test_propose_takes_the_tokens_of_the_reference(own, tied, tmp_path):
    """Slot k of [last, MASK …] predicts the token k positions on, with the target's embedding and head or its own."""
    raw, window, _ = CASES["sliding_is_causal"]
    rng = np.random.default_rng(5)
    tables = {name: rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32) for name in own}
    drafter, tensors = saved(raw | {"tie_word_embeddings": tied}, tmp_path, more=tables)
    assert drafter.config.own_embedding == any("embed" in name for name in own)
    assert drafter.config.own_head == ("lm_head.weight" in own or (tied and bool(own)))
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    head = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    features = rng.standard_normal((SLOTS, CAPACITY, TAPS, HIDDEN)).astype(np.float32)
    last = rng.integers(0, VOCAB, SLOTS)
    cache = build_context(drafter, features, LENGTHS, window, CAPACITY, 13, rng)
    # The position that a draft is chosen for comes back above the token.
    borrowed = TargetHeads(
        lambda tokens: jnp.asarray(table)[tokens],
        lambda hidden: hidden @ head.T,
        lambda scores, positions, ids: scores.argmax(-1) + 1000 * positions,
        lambda *_: None,
    )
    run = jax.jit(lambda *args: drafter.propose(*args, SLOTS, borrowed, window).tokens)
    got = np.asarray(run(cache, jnp.asarray(last), jnp.asarray(LENGTHS), jnp.asarray(WIDTHS)))
    assert got.shape == (SLOTS, SLOTS - 1)
    np.testing.assert_array_equal(got // 1000, LENGTHS[:, None] + np.arange(1, SLOTS))
    got = got % 1000
    table = next((own for name, own in tables.items() if "embed" in name), table)
    head = tables.get("lm_head.weight", table if tied and own else head)
    tokens = np.concatenate([last[:, None], np.full((SLOTS, SLOTS - 1), 51)], axis=1)
    compared = 0
    for row, hidden in enumerate(reference_rows(raw, tensors, features, LENGTHS, WIDTHS, table[tokens], window)):
        scores = hidden.value[1:] @ head.T
        clear = np.diff(np.sort(scores, axis=-1)[:, -2:], axis=-1)[:, 0] > 1e-3
        np.testing.assert_array_equal(got[row, : WIDTHS[row] - 1][clear], scores.argmax(-1)[clear])
        compared += clear.sum()
    assert compared > 100


def test_keys_inside_dflash_config_win():
    own = {"block_size": 8, "num_target_layers": 7, "target_layer_ids": [6, 2], "mask_token_id": 3}
    got = dflash.read_config(config(block_size=16, num_target_layers=5, target_layer_ids=[1], dflash_config=own))
    assert (got.block_size, got.num_target_layers, got.target_layer_ids, got.mask_token_id) == (8, 7, (6, 2), 3)
    top = config(target_layer_ids=[4, 0])
    del top["dflash_config"]["target_layer_ids"]
    assert dflash.read_config(top).target_layer_ids == (4, 0)


@pytest.mark.parametrize(("target", "layers", "taps"), [(36, 5, (1, 9, 17, 25, 33)), (5, 1, (2,)), (40, 2, (1, 37))])
def test_config_without_taps_gets_the_default_layers(target, layers, taps):
    raw = config(num_target_layers=target, num_hidden_layers=layers)
    del raw["dflash_config"]["target_layer_ids"]
    assert dflash.read_config(raw).target_layer_ids == taps


def test_options_of_others_that_are_off():
    off = {"projector_type": None, "shift_label": False, "pure_draft_prefix_len": 0, "sample_from_anchor": False}
    plain = dflash.read_config(config())
    assert dflash.read_config(config(dflash_config={**off, "target_hidden_size": HIDDEN})) == plain


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": [SLIDING, FULL]}, "sliding_window"),
        ({"layer_types": [FULL]}, "1 entries"),
        ({"layer_types": [FULL, "linear_attention"]}, "linear_attention"),
        ({"dflash_config": {"use_swa": True}}, "swa_window_size"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"dflash_config": {"selector_rank": 256}}, "selector_top_k is missing: it comes with selector_rank"),
        ({"conv_group_size": 4}, "conv_kernel_size is missing: it comes with conv_group_size"),
        ({"conv_kernel_size": 2, "conv_group_size": 5}, "conv_group_size is 5: it must divide hidden_size, 24"),
        ({"dflash_config": {"selector_rank": 8, "selector_top_k": 1000}}, "selector_top_k is 1000"),
        ({"dflash_config": {"selector_vocab_size": 9}}, "selector_vocab_size"),
        ({"dflash_config": {"lilicorr_enabled": True}}, "LiLiCorr"),
        ({"dflash_config": {"lilicorr_new": 3}}, "LiLiCorr"),
        ({"architectures": ["Qwen3MoeDSparkModel"]}, "Qwen3MoeDSparkModel"),
        ({"markov_rank": 256, "selector_rank": 8, "selector_top_k": 4}, "a drafter has one of them"),
        (
            {"dflash_config": {"projector_type": "domino"}},
            "projector_type is 'domino': the kinds known here are dflash,",
        ),
        ({"architectures": ["XPressDraftModel"]}, "XPress"),
        ({"dflash_config": {"xpress_rank": 256}}, "XPress"),
        ({"dflash_config": {"projector_type": "domino", "shift_label": True}}, r"Domino .*shift_label"),
        ({"architectures": ["Eagle3DraftModel"]}, "Eagle3DraftModel.*DFlashDraftModel"),
        ({"dflash_config": {"tree_mode": None, "depth": 2}}, r"'depth', 'tree_mode': known are .*causal_head"),
        ({"head_type": "causal"}, "head_type.*causal_head"),
        ({"dflash_config": {"causal_head": 1}}, "causal_head is 1: it must be true or false"),
        ({"dflash_config": {"target_hidden_size": 48}}, "target_hidden_size is 48"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_bad_config_is_named(changes, says):
    with pytest.raises(InputError, match=says):
        dflash.read_config(config(**changes))
