"""Drafters with an embedding and a head of their own: text, copies of the target's tables, shortlists, memory."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_drafter, open_any
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.ops.weights import QuantizedWeight, dense, quantize
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE
from dflash_jax.planner import make_plan, read_shapes
from dflash_jax.training.drafters import export, raw_config, starting_drafter
from dflash_jax.training.losses import Head, Loss
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.pair import Pair
from dflash_jax.training.step import Batch, Recipe, Trainer, batch_sums
from tests import few_bits
from tests.helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config
from tools.bundled_pair import without_selector

PROMPTS = ["def read_config(path):\n", "import json\nfor line in file:\n    "]
PARAMS = [
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=40),
    SamplingParams(temperature=0.9, seed=4, ignore_eos=True, max_tokens=40, frequency_penalty=0.3, top_p=0.9),
]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def with_tables(path, **tables):
    """The bundled drafter with further tensors, at ``path``."""
    directory = shutil.copytree(TINY / "draft", path)
    file = directory / "model.safetensors"
    save_file(load_file(file) | tables, file)
    return directory


@pytest.fixture(scope="module")
def tables():
    """The bundled target's embedding and head."""
    tensors = load_file(TINY / "target" / "model.safetensors")
    embedding = next(array for name, array in tensors.items() if name.endswith(EMBEDDING))
    return {EMBEDDING: embedding, HEAD: tensors.get(HEAD, embedding)}


@pytest.fixture(scope="module")
def own(tables, tmp_path_factory):
    """The bundled drafter with other tables: the target's, moved by noise of a third of their size."""
    rng = np.random.default_rng(0)
    moved = {}
    for name, table in tables.items():
        table = table.astype(np.float32)
        moved[name] = (table + rng.normal(0, table.std() / 3, table.shape)).astype(ml_dtypes.bfloat16)
    return with_tables(tmp_path_factory.mktemp("own") / "draft", **moved)


def answers(llm):
    return [(c.token_ids, c.acceptance_lengths) for c in llm.generate(PROMPTS, PARAMS, block_size=8)]


@pytest.fixture(scope="module")
def whole():
    return answers(LLM())


def test_the_text_is_the_targets_whatever_tables_draft(whole, own):
    llm = LLM(None, own)
    assert (llm.drafter.config.own_embedding, llm.drafter.config.own_head) == (True, True)
    found = answers(llm)
    assert [ids for ids, _ in found] == [ids for ids, _ in whole]
    # They draft: other tokens than the target's tables, and by no means none of the right ones.
    rounds = [sum(len(lengths) for _, lengths in each) for each in (whole, found)]
    assert rounds[0] < rounds[1] < sum(len(ids) for ids, _ in whole)


def test_tables_that_equal_the_targets_are_the_targets(whole, tables, own, tmp_path):
    plain, copies = LLM(), LLM(None, with_tables(tmp_path / "copies", **tables))
    assert not copies.drafter.config.own_embedding
    assert not copies.drafter.config.own_head
    assert copies.loaded_bytes == plain.loaded_bytes < LLM(None, own).loaded_bytes
    assert answers(copies) == whole
    half = LLM(None, with_tables(tmp_path / "half", **{HEAD: tables[HEAD], EMBEDDING: 2 * tables[EMBEDDING]}))
    assert (half.drafter.config.own_embedding, half.drafter.config.own_head) == (True, False)
    assert not plain.with_drafter(load_drafter(tmp_path / "copies")).drafter.config.own_head


def test_a_shortlist_has_rows_of_the_head_that_drafts(own, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps([3, 5, 9]))
    rows = {
        "own": load_file(own / "model.safetensors")[HEAD][[3, 5, 9]],
        "target": np.asarray(LLM().target.head_rows(jnp.asarray([3, 5, 9]))),
    }

    def assert_rows(llm, of: str) -> None:
        head = llm.drafter.vocabulary.head[...]
        head = np.asarray(head.dense() if hasattr(head, "dense") else head)
        np.testing.assert_array_equal(head, rows[of].astype(head.dtype))

    mine, other = (LLM(None, draft, draft_tokens=tmp_path / "ids.json") for draft in (own, TINY / "draft"))
    assert_rows(mine, "own")
    assert_rows(other, "target")
    assert_rows(other.with_drafter(mine.drafter), "own")
    assert_rows(mine.with_drafter(other.drafter), "target")


def test_the_plan_counts_the_tables(own):
    options = {"dtype": jnp.bfloat16, "slots": 1, "max_len": 1024, "context": 512, "acceptance_length": 3, "block": 8}
    plans = [
        make_plan(read_shapes(str(TINY / "target"), str(draft)), ONE_DEVICE, DEVICES["h100"], **options)
        for draft in (TINY / "draft", own)
    ]
    parameters, sizes = ([plan[key] for plan in plans] for key in ("parameters", "bytes_per_device"))
    assert parameters[1]["drafter"] - parameters[0]["drafter"] == 2 * 512 * 192
    assert sizes[1]["drafter"] - sizes[0]["drafter"] == 2 * 2 * 512 * 192
    # One head is read for the drafts, the drafter's or the target's.
    assert plans[0]["floor_tokens_per_s"] == pytest.approx(plans[1]["floor_tokens_per_s"])


def assert_same(found, expected) -> None:
    assert found.config == expected.config
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_tables_go_through_orbax_and_export(own, tmp_path):
    opened, module = open_any(own)
    options = {"dtype": None, "quantize": None}
    orbax.convert(opened, module, own, tmp_path / "orbax", ONE_DEVICE, options, lambda todo: todo)
    assert_same(load_drafter(tmp_path / "orbax"), load_drafter(own))
    raw = json.loads((own / "config.json").read_text())
    export(load_drafter(own), raw, tmp_path / "exported")
    assert_same(load_drafter(tmp_path / "exported"), load_drafter(own))
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    assert Pair(LLM(None, None), raw, tensors).draft == load_drafter(own).config


@pytest.mark.parametrize("name", ["d2t", "t2d", "markov_head.markov_w1.weight"])
def test_tensors_that_the_config_does_not_name_are_refused(name, tmp_path):
    with pytest.raises(InputError, match=f"unexpected '{name}'"):
        load_drafter(with_tables(tmp_path / "draft", **{name: np.zeros(8, np.float32)}))


def test_a_head_of_fewer_tokens_is_refused(tables, tmp_path):
    with pytest.raises(InputError, match=r"'lm_head.weight' has shape \[300, 192\], it must be \[512, 192\]"):
        load_drafter(with_tables(tmp_path / "draft", **{HEAD: tables[HEAD][:300]}))


@pytest.mark.parametrize("form", [None, "fp8", "int4"])
@pytest.mark.parametrize("vocabulary", [None, range(0, 60, 2)], ids=["all", "some"])
def test_training_drafts_with_the_drafters_tables_and_is_taught_by_the_targets(form, vocabulary):
    """The target's head may be in few bits."""
    target = random_decoder(tiny_config("da"))
    if form is not None:
        target.head = nnx.Param(quantize(target.head[...], form))
    config = replace(tiny_draft_config(target.config, windows=(None,)), own_embedding=True, own_head=True)
    drafter, key = random_drafter(config, seed=1), jax.random.key(0)
    tokens = jax.random.randint(key, (2, 24), 0, target.config.vocab_size)
    rows = jnp.ones((2, 24), bool), jnp.zeros((2, 24), jnp.int32)
    some = None if vocabulary is None else np.asarray(vocabulary)
    trainer = Trainer(target, config, Recipe(Loss("hybrid", chunk=4), 4, 8), optimiser(1e-3, 1), vocabulary=some)

    @jax.jit
    def both(drafter, leaves):
        hidden, features = trainer.features(leaves, tokens, rows[1])
        batch = Batch(tokens, *rows, features, hidden)
        heads = [Head.over(target.backend, dense(owner.head_weight), some) for owner in (target, drafter)]
        restated = [
            batch_sums(drafter, embed, head, batch, key, trainer.recipe, teacher).loss
            for embed in (target.embed_tokens, lambda ids: drafter.embed[...][ids])
            for head in heads
            for teacher in heads
        ]
        grads = jax.grad(lambda d: trainer.sums(d, leaves, batch, key).loss)(drafter)
        return trainer.sums(drafter, leaves, batch, key).loss, jnp.stack(restated), grads

    found, restated, grads = both(drafter, trainer.leaves)
    # The drafter's embedding and head, and the target's head as the teacher's.
    assert float(found) == pytest.approx(float(restated[6]), rel=1e-6)
    assert len(set(np.round(restated, 3).tolist())) == 8
    assert np.any(grads.embed[...])
    assert np.any(grads.head[...])


def in_fp8(directory, path, names):
    """A drafter with the matrices that ``names`` says in FP8, one scale for each block of 128."""
    directory = shutil.copytree(directory, path)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if names(name)]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.ones((-(-rows // 128), -(-columns // 128)), ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", ["none", "copies", "own"])
def test_tables_beside_weights_in_fp8(kind, tables, own, whole, tmp_path):
    plain = {"none": TINY / "draft", "own": own}.get(kind) or with_tables(tmp_path / "copies", **tables)
    scaled = in_fp8(plain, tmp_path / "fp8", lambda name: name.endswith("_proj.weight"))
    llm = LLM(None, scaled)
    assert (llm.drafter.config.own_head, llm.drafter.config.own_embedding) == ((kind == "own",) * 2)
    assert [ids for ids, _ in answers(llm)] == [ids for ids, _ in whole]
    # From memory its weights are multiplied out.
    assert [ids for ids, _ in answers(LLM().with_drafter(llm.drafter))] == [ids for ids, _ in whole]


def test_of_tables_in_fp8_the_head_stays_so(own, tmp_path):
    for name, kind in ((HEAD, None), (HEAD, "none"), (EMBEDDING, None)):
        scaled = in_fp8(own, tmp_path / f"{name} {kind}", lambda found, name=name: found == name)
        drafter = load_drafter(scaled, quantize=kind)
        table = (drafter.head if name == HEAD else drafter.embed)[...]
        assert isinstance(table, QuantizedWeight) == (name == HEAD and kind is None)
        np.testing.assert_array_equal(dense(table), TensorFiles(scaled).read(name).astype(np.float32))


@pytest.mark.parametrize("is_reduced", [False, True], ids=["whole", "reduced"])
def test_a_head_in_few_bits_that_equals_the_targets_is_the_targets(is_reduced, tmp_path):
    """In one form or another, from disk and from memory; and one that differs is the drafter's own."""
    targets, ids = few_bits.in_fp8(TINY / "target", tmp_path / "target", lambda name: name == HEAD), np.arange(3, 99)
    files = TensorFiles(targets)
    head = {name: files.read(name) for name in (HEAD, f"{HEAD}_scale")}
    multiplied = head[HEAD].astype(np.float32) * head[f"{HEAD}_scale"].astype(np.float32)
    other = head | {HEAD: -head[HEAD]}
    for kind, tensors in {"same": head, "multiplied": {HEAD: multiplied}, "other": other}.items():
        path = without_selector(tmp_path / kind)
        raw = json.loads((path / "config.json").read_text())
        if is_reduced:
            tensors = {name: array[ids] for name, array in tensors.items()} | {"d2t": ids - np.arange(len(ids))}
            raw["dflash_config"]["draft_vocab_size"] = len(ids)
        if kind != "multiplied":
            raw["quantization_config"] = few_bits.config("fp8 channel")
        (path / "config.json").write_text(json.dumps(raw))
        save_file(load_file(path / "model.safetensors") | tensors, path / "model.safetensors")
        for llm in (LLM(targets, path), LLM(targets).with_drafter(load_drafter(path))):
            assert llm.drafter.config.own_head == (kind == "other"), kind


def test_a_drafter_in_few_bits_is_trained_and_exported_whole(own, tmp_path):
    scaled = few_bits.in_fp8(own, tmp_path / "fp8", lambda name: name.endswith("_proj.weight") or name == HEAD)
    llm, config = LLM(None, None), TrainConfig(data=("x",), output="y", draft=str(scaled))
    raw, whole = raw_config(config, llm), load_drafter(scaled, quantize="none")
    # Its few bits were read.
    assert jax.tree.structure(load_drafter(scaled)) != jax.tree.structure(whole)
    drafter = starting_drafter(config, raw, llm.target, llm.directory)
    assert_same(drafter, whole)
    export(drafter, raw, tmp_path / "exported")
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    assert_same(load_drafter(tmp_path / "exported", jnp.bfloat16), load_drafter(scaled, jnp.bfloat16, quantize="none"))
