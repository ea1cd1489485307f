"""One drafter in several layouts: the same configuration, weights and drafts; and what is refused by name."""

import json
import pickle
import re
import zipfile

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.checkpoint.load import load_drafter, save_module
from dflash_jax.checkpoint.torch_file import find_tensor
from dflash_jax.errors import InputError
from dflash_jax.models.config import ConvSpec, SelectorSpec
from dflash_jax.models.families import dflash, read_drafter
from dflash_jax.parallel.sharding import parameter_paths
from tests.parity.test_drafter import FULL, HIDDEN, SLIDING, VOCAB, config, random_tensors

IDS = np.array([2, 3, 5, 11, 17, 29, 40, 51])
DSPARK = {"markov_rank": 6, "markov_head_type": "gated", "enable_confidence_head": True}
# Of speculators, by its kind: what is beside the layers' config.
KINDS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 7, "selector_top_k": 5},
    "dspark": DSPARK | {"confidence_head_with_markov": True, "sample_from_anchor": True},
}


def published(kind: str, **changes) -> dict:
    """The drafter of a kind as z-lab's config writes it."""
    own = KINDS[kind] | {"block_size": 6, "mask_token_id": 51, "target_layer_ids": [3, 1], "is_causal": False}
    own |= changes.pop("dflash_config", {})
    return config(layer_types=[SLIDING, FULL], sliding_window=9, num_target_layers=None, dflash_config=own, **changes)


def speculators(kind: str, **changes) -> dict:
    """The same as speculators writes it: what differs from transformers' Qwen3Config, and layers counted from one."""
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    raw = published(kind)
    layers = {key: raw[key] for key in (*kept, "head_dim", "vocab_size", "max_position_embeddings", "layer_types")}
    layers |= {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True, "rms_norm_eps": 1e-6}
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    layers["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "speculators_model_type": kind,
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else f"D{kind[1:].capitalize()}Speculator"],
        "transformer_layer_config": layers,
        "draft_vocab_size": VOCAB,
        "block_size": 6,
        "mask_token_id": 51,
        "aux_hidden_state_layer_ids": [4, 2],
        "sliding_window_non_causal": True,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [proposal], "verifier": verifier},
        **KINDS[kind],
        **changes,
    }


def tensors_of(kind: str, drafted: int = VOCAB, seed: int = 0) -> dict[str, np.ndarray]:
    rng, tensors = np.random.default_rng(seed), random_tensors(published(kind), seed)
    if kind == "dspark":
        shapes = {"markov_w1.weight": (VOCAB, 6), "markov_w2.weight": (drafted, 6), "gate_proj.weight": (6, HIDDEN + 6)}
        shapes = {f"markov_head.{name}": shape for name, shape in (shapes | {"gate_proj.bias": (6,)}).items()}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,)}
        tensors |= {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors


def written(raw: dict, tensors: dict, path):
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return path


def assert_same(a, b):
    assert parameter_paths(a) == parameter_paths(b)
    for path, x, y in zip(parameter_paths(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_the_same_in_both_layouts(kind, tmp_path):
    tensors = tensors_of(kind)
    one = load_drafter(written(published(kind), tensors, tmp_path / "published"))
    other = load_drafter(written(speculators(kind), tensors, tmp_path / "speculators"))
    assert one.config == other.config
    assert one.config.is_shifted == (kind == "dspark")
    assert one.config.block_size == 6 + (kind == "dspark")
    assert_same(one, other)


def test_defaults_of_speculators_are_its_own():
    raw = speculators("dflash2")
    for key in (*KINDS["dflash2"], "sliding_window_non_causal", "block_size"):
        del raw[key]
    raw["transformer_layer_config"] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 999}
    raw["draft_vocab_size"] = 999
    read = dflash.read_config(raw)
    assert (read.conv, read.selector, read.block_size) == (ConvSpec(2, 16), SelectorSpec(256, 16), 8)
    assert [layer.attention.num_kv_heads for layer in read.layers] == [32, 32]
    assert [(layer.intermediate_size, layer.window, layer.causal) for layer in read.layers] == [
        (22016, None, False)
    ] * 2
    plain = speculators("dflash", sliding_window_non_causal=False)
    assert [layer.causal for layer in dflash.read_config(plain).layers] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_older_versions_of_speculators_are_read_with_the_places_of_dflash(kind):
    older = {"max_anchors": 3072, "tie_word_embeddings": False, "has_no_defaults_at_init": False}
    raw = speculators(kind, **older) | {"sample_from_anchor": None}
    read = dflash.read_config(raw)
    assert (read.is_shifted, read.block_size) == (False, 6)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_missing_keys_of_speculators_layers_are_the_defaults_of_their_model_type(model_type):
    """The layers are Qwen3's, with norms of queries and keys, whatever type their config has."""
    expected = pytest.importorskip("transformers").AutoConfig.for_model(model_type)
    raw = speculators("dflash", draft_vocab_size=None)
    raw["transformer_layer_config"] = {"model_type": model_type, "num_hidden_layers": 2}
    read = dflash.read_config(raw)
    attention = read.layers[0].attention
    assert (read.vocab_size, read.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (read.max_positions, read.norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    assert attention.rope.theta == expected.rope_parameters["rope_theta"]
    heads = (expected.num_attention_heads, expected.num_key_value_heads, expected.head_dim)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == heads
    assert [(layer.intermediate_size, layer.window) for layer in read.layers] == [
        (expected.intermediate_size, None)
    ] * 2
    assert attention.qk_norm
    for other in ("gemma3_text", ["llama"]):
        raw["transformer_layer_config"]["model_type"] = other
        with pytest.raises(InputError, match=rf"model_type is {re.escape(repr(other))}: known are qwen3 and llama"):
            dflash.read_config(raw)
    with pytest.raises(InputError, match=r"speculators_model_type is \['dflash'\]: known are dflash, dflash2, dspark"):
        read_drafter(raw | {"speculators_model_type": ["dflash"], "architectures": []})


@pytest.mark.parametrize("layers", [[FULL, FULL], None])
def test_a_window_that_no_layer_of_speculators_has_changes_nothing(layers):
    """Without names of layers those from `max_window_layers` slide, as in Qwen3Config."""
    raw = speculators("dflash")
    raw["transformer_layer_config"] |= {"layer_types": layers, "use_sliding_window": True}
    assert [layer.window for layer in dflash.read_config(raw).layers] == [None, None]
    raw["transformer_layer_config"] |= {"layer_types": None, "max_window_layers": 1}
    assert [layer.window for layer in dflash.read_config(raw).layers] == [None, 9]


def test_drafters_of_speculators_rotate_whole_heads():
    """Its configs have their target's rotary embedding, and its layers rotate whole heads whatever these say."""
    raw = speculators("dflash")
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.4, "mrope_section": [2, 0, 0]}
    raw["transformer_layer_config"] |= {"rope_parameters": rope, "partial_rotary_factor": 0.4}
    assert dflash.read_config(raw) == dflash.read_config(speculators("dflash"))


@pytest.mark.parametrize(
    ("own", "top", "shifted"),
    [({}, {}, True), ({"sample_from_anchor": False}, {}, False), ({}, {"sample_from_anchor": False}, False)],
)
def test_a_dspark_config_of_specforge_is_shifted_unless_it_says_otherwise(own, top, shifted):
    head = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    section = DSPARK | head | {"confidence_head_with_markov": True} | own
    raw = published("dflash", dflash_config=section) | {"architectures": ["DSparkDraftModel"]} | top
    read = dflash.read_config(raw)
    assert (read.is_shifted, read.block_size) == (shifted, 6 + shifted)
    assert read.selector == SelectorSpec(6, 16, "gated")
    assert read == dflash.read_config({**raw, "architectures": ["Qwen3DSparkModel"]})


@pytest.mark.parametrize("key", ["rope_parameters", "dflash_config"])
@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "DSparkDraftModel"])
def test_a_section_that_is_no_object_is_named(architecture, key):
    with pytest.raises(InputError, match=f"{key} is 3: it must be an object"):
        dflash.read_config(published("dflash") | {"architectures": [architecture], key: 3})


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_reduced_vocabulary_is_read_and_written(kind, tmp_path):
    rng = np.random.default_rng(1)
    offsets = IDS - np.arange(len(IDS))
    head = rng.standard_normal((len(IDS), HIDDEN)).astype(np.float32)
    derived = np.isin(np.arange(VOCAB), IDS).astype(np.int32)
    tensors = tensors_of(kind, len(IDS)) | {"d2t": offsets, "t2d": derived, "lm_head.weight": head}
    path = written(speculators(kind, draft_vocab_size=len(IDS)), tensors, tmp_path / "given")
    drafter = load_drafter(path, dtype=np.float16)
    np.testing.assert_array_equal(drafter.head_ids[...], IDS)
    assert drafter.head_ids.dtype == np.int32
    assert drafter.head[...].dtype == np.float16
    np.testing.assert_array_equal(drafter.head_rows(np.array([17, 2])), head[[4, 0]].astype(np.float16))
    raw = published(kind, dflash_config={"draft_vocab_size": len(IDS)})
    drafter = load_drafter(path)
    save_module(drafter, dflash.weight_names(drafter.config), raw, tmp_path / "again", dtype=np.float32)
    assert_same(drafter, load_drafter(tmp_path / "again"))


@pytest.mark.parametrize("kind", ["d2t", "t2d", "both"])
def test_a_head_of_all_tokens_may_say_so(kind, tmp_path):
    """With the tensors of a reduced head, where these name every token in order."""
    head = np.random.default_rng(1).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    tensors = tensors_of("dflash") | {"lm_head.weight": head}
    said = {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
    said = said if kind == "both" else {kind: said[kind]}
    found = load_drafter(written(speculators("dflash"), tensors | said, tmp_path / "said"))
    assert_same(found, load_drafter(written(speculators("dflash"), tensors, tmp_path / "plain")))
    assert found.config.draft_vocab_size is None
    for name, array in said.items():
        other = array.copy()
        other[-1] = not other[-1]
        with pytest.raises(InputError, match=rf"unexpected '{name}' \[{VOCAB}\]"):
            load_drafter(written(speculators("dflash"), tensors | {name: other}, tmp_path / "other"))
    bad = tensors | {"norm.weight": np.ones(HIDDEN, bool)}
    with pytest.raises(InputError, match=r"'norm.weight' has dtype BOOL: it must have floating-point"):
        load_drafter(written(speculators("dflash"), bad, tmp_path / "bad"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"d2t": None}, "no tensor d2t: draft_vocab_size is 8 of 53 tokens"),
        ({"d2t": np.zeros(8, np.float32)}, "'d2t' has dtype F32: it must have whole numbers"),
        ({"d2t": np.arange(8)[::-1].copy()}, "d2t gives tokens that do not ascend"),
        ({"d2t": IDS - np.arange(8) + 2}, "d2t gives the token 53: vocab_size is 53"),
        ({"d2t": np.full(8, 2**32)}, "d2t gives the token 4294967303: vocab_size is 53"),
        ({"d2t": np.arange(9)}, r"'d2t' has shape \[9\], it must be \[8\]"),
        (
            {"norm.weight": np.zeros(HIDDEN, np.int64)},
            "'norm.weight' has dtype I64: it must have floating-point",
        ),
        ({"markov_head.other": np.zeros(3, np.float32)}, "unexpected 'markov_head.other'"),
    ],
)
def test_a_wrong_tensor_is_named(change, says, tmp_path):
    head = np.zeros((len(IDS), HIDDEN), np.float32)
    tensors = tensors_of("dspark", len(IDS)) | {"d2t": IDS - np.arange(len(IDS)), "lm_head.weight": head} | change
    kept = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(InputError, match=says):
        load_drafter(written(speculators("dspark", draft_vocab_size=len(IDS)), kept, tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"aux_hidden_state_layer_ids": [0, 2]}, "reads embeddings"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"sliding_window_non_causal": 1}, "sliding_window_non_causal is 1"),
        ({"new_key": 3}, "new_key is 3"),
        ({"markov_head_type": "wide"}, "markov_head_type is 'wide': it must be vanilla, gated or rnn"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "the drafter has no Markov head"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size is 54: vocab_size is 53"),
    ],
)
def test_a_wrong_key_is_named(change, says):
    with pytest.raises(InputError, match=says):
        dflash.read_config(speculators("dspark", **change))


def test_a_copy_of_the_targets_config_is_read_as_its_own():
    """DeepSpec copies the target's config: keys of the target's layers are not the drafter's."""
    raw = published("dspark")
    own = {
        key: value for key, value in raw.pop("dflash_config").items() if key not in ("is_causal", "sample_from_anchor")
    }
    deepspec = {key: value for key, value in raw.items() if key not in ("layer_types", "sliding_window")} | own
    deepspec |= {"architectures": ["Qwen3DSparkModel"], "layer_types": [FULL, FULL], "num_anchors": 512}
    deepspec |= {"partial_rotary_factor": 0.25, "attn_output_gate": True, "linear_conv_kernel_dim": 4}
    read = dflash.read_config(deepspec)
    assert read.is_shifted
    assert read.block_size == 7
    assert read.layers[0].attention.rope.dim == 10
    assert not read.layers[0].attention.gated
    assert read.selector == SelectorSpec(6, 16, "gated")


def torch_file(path, array: np.ndarray, value=None, storage="FloatStorage", stored=True):
    """What ``torch.save`` writes, without torch: a pickle that names torch's functions, and the array's bytes."""

    described = pickle.PROTO + bytes([2])

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\n" + storage.encode() + b"\n"
    tensor += text("0") + text("cpu") + number(array.size) + b"tQ" + number(0)
    sizes = b"(" + b"".join(map(number, array.shape)) + b"t"
    strides = b"(" + b"".join(number(s // array.itemsize) for s in array.strides) + b"t"
    tensor += sizes + strides + b"\x89ccollections\nOrderedDict\n)RtR"
    if value == "dictionary":
        tensor = b"}(" + text("mask_token_id") + number(7) + text("embedding") + tensor + b"u"
    elif value is not None:
        tensor = value
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mask/data.pkl", described + tensor + b".")
        archive.writestr("mask/data/0", array.tobytes())


@pytest.mark.parametrize("value", [None, "dictionary"])
@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN)])
def test_a_mask_embedding_beside_the_weights_is_read(value, shape, tmp_path):
    row = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    path = written(published("dflash"), tensors_of("dflash"), tmp_path / "given")
    assert not load_drafter(path).config.own_mask
    torch_file(path / "mask_embedding.pt", row, value)
    drafter = load_drafter(path)
    assert drafter.config.own_mask
    np.testing.assert_array_equal(drafter.mask[...], row.reshape(-1))
    save_module(drafter, dflash.weight_names(drafter.config), published("dflash"), tmp_path / "again", dtype=np.float32)
    assert_same(drafter, load_drafter(tmp_path / "again"))


def test_files_of_torch_are_read_as_torch_writes_them(tmp_path):
    torch = pytest.importorskip("torch")
    for dtype, name in ((torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16")):
        row = torch.randn(2, HIDDEN).to(dtype)
        for value in (
            row[1],
            {"mask_token_id": 3, "embedding": torch.nn.Parameter(row)[1]},
            torch.nn.Parameter(row[1]),
        ):
            torch.save(value, tmp_path / "mask.pt")
            found, shape, start = find_tensor(tmp_path / "mask.pt")
            data = (tmp_path / "mask.pt").read_bytes()[start : start + HIDDEN * row.element_size()]
            assert (found, shape) == (name, (HIDDEN,))
            assert torch.frombuffer(bytearray(data), dtype=dtype).equal(row[1])


HOSTILE = {
    "a program": b"cposix\nsystem\n(X\x04\x00\x00\x00trueu0tR",
    "another function of torch": b"ctorch\nload\n(tR",
    "no tensor": b"N",
    "a number": b"K\x07",
    "a negative size": b"ctorch._utils\n_rebuild_tensor_v2\n(NJ\xff\xff\xff\xff(J\xff\xff\xff\xfft(K\x01ttR",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_nothing_and_is_refused(name, tmp_path):
    torch_file(tmp_path / "mask.pt", np.zeros(3, np.float32), HOSTILE[name])
    with pytest.raises(InputError, match="is no file of one tensor that torch"):
        find_tensor(tmp_path / "mask.pt")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"K\x07r\x00\x00\x00\x04", "its memo has the index 67108864"),
        (b")q\x01" + b"h\x01h\x01\x86q\x01" * 60, "it repeats what is no text and no name"),
        (b")" + b"\x85" * 60_000, "it has the operation TUPLE1 in place 1000"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}b", "it has the operation BUILD"),
    ],
    ids=["room for a memo", "tuples of tuples", "a deep tuple", "an attribute of a function"],
)
def test_a_pickle_is_refused_before_it_takes_time_or_memory(value, says, tmp_path):
    torch_file(tmp_path / "mask.pt", np.zeros(3, np.float32), value)
    with pytest.raises(InputError, match=says):
        find_tensor(tmp_path / "mask.pt")


def test_damaged_files_are_refused(tmp_path):
    row, path = np.arange(12, dtype=np.float32), tmp_path / "mask.pt"
    torch_file(path, row)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole[: rng.integers(0, len(whole) + 1)])
        for _ in range(rng.integers(0, 4) if data else 0):
            data[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(data)
        try:
            dtype, shape, start = find_tensor(path)
        except InputError:
            continue
        assert start + np.prod(shape) * {"F32": 4}.get(dtype, 2) <= len(data)
    torch_file(path, row, stored=False)
    with pytest.raises(InputError, match="not stored in one piece"):
        find_tensor(path)
    torch_file(path, row.reshape(3, 4).T)
    with pytest.raises(InputError, match="not stored in one piece"):
        find_tensor(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mask/data.pkl", b"\x80\x02" + b"N0" * 2**24 + b"N.")
    with pytest.raises(InputError, match="no file of one tensor"):
        find_tensor(path)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        find_tensor(path)
