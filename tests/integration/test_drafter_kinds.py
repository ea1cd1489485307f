"""DFlash2 and DSpark drafters beside the bundled target: the text is the target's, however they draft."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.load import load_drafter, open_any
from dflash_jax.errors import InputError
from dflash_jax.frontend import loading
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE
from dflash_jax.planner import make_plan, read_shapes
from dflash_jax.training.drafters import export
from tests.integration.test_own_tables import assert_same
from tools.bundled_pair import without_selector

PROMPTS = ["def read_config(path):\n", "import json\nfor line in file:\n    "]
PARAMS = [
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=40),
    SamplingParams(temperature=0.9, seed=4, ignore_eos=True, max_tokens=40, frequency_penalty=0.3, top_p=0.9),
]
HIDDEN, VOCAB, RANK, DRAFTED = 192, 512, 4, 200
IDS = np.sort(np.random.default_rng(7).choice(VOCAB, DRAFTED, replace=False))
MARKOV = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
# Keys of each kind, and shapes of its tensors.
KINDS = {
    "dflash2": (
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 6},
        {
            "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
            "candidate_selector.predecessor_codebook": (VOCAB, RANK),
            "candidate_selector.successor_codebook": (VOCAB, RANK),
        },
    ),
    "gated": (
        MARKOV | {"markov_head_type": "gated", "sample_from_anchor": True, "block_size": 7},
        {
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (VOCAB, RANK),
            "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
            "markov_head.gate_proj.bias": (RANK,),
            "confidence_head.proj.weight": (1, HIDDEN + RANK),
            "confidence_head.proj.bias": (1,),
        },
    ),
    "rnn of some tokens": (
        MARKOV | {"markov_head_type": "rnn", "confidence_head_with_markov": False, "draft_vocab_size": DRAFTED},
        {
            "markov_head.markov_w1.weight": (VOCAB, RANK),
            "markov_head.markov_w2.weight": (DRAFTED, RANK),
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
            "markov_head.joint_proj.bias": (3 * RANK,),
            "confidence_head.proj.weight": (1, HIDDEN),
            "confidence_head.proj.bias": (1,),
            "mask_embedding": (HIDDEN,),
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def draft(request, tmp_path_factory):
    """The bundled drafter, without its selector, as another kind, with random heads."""
    keys, shapes = KINDS[request.param]
    path = without_selector(tmp_path_factory.mktemp("kind") / "draft")
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(0)
    raw = json.loads((path / "config.json").read_text())
    raw["dflash_config"] |= {key: value for key, value in keys.items() if key != "block_size"}
    raw |= {key: value for key, value in keys.items() if key == "block_size"}
    shapes = dict(shapes)
    if "conv_kernel_size" in keys:
        for i in range(raw["num_hidden_layers"]):
            for side in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{side}.base_kernel"] = (2, 2, HIDDEN)
                shapes[f"layers.{i}.{side}.kernel_projection.weight"] = (2 * 2 * HIDDEN // 16, HIDDEN)
    added = {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in added:
        if name.endswith("base_kernel"):
            added[name][:, 0] += 1
    if "draft_vocab_size" in keys:
        added["d2t"] = IDS - np.arange(DRAFTED)
        target = load_file(TINY / "target" / "model.safetensors")
        table = next(tensor for name, tensor in target.items() if name.endswith("embed_tokens.weight"))
        # With the target's rows it drafts nearly as well as the bundled one.
        added |= {"lm_head.weight": table[IDS].copy(), "mask_embedding": table[raw["dflash_config"]["mask_token_id"]]}
    save_file(tensors | added, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    return path


def answers(llm, block_size: int):
    return [c.token_ids for c in llm.generate(PROMPTS, PARAMS, block_size=block_size)]


@pytest.fixture(scope="module")
def plain():
    return answers(LLM(), 1)


def test_the_text_is_the_targets_at_every_block_size(plain, draft):
    llm = LLM(None, draft)
    drafted = 0
    for size in (1, 2, 5, 8):
        completions = llm.generate(PROMPTS, PARAMS, block_size=size)
        assert [c.token_ids for c in completions] == plain
        drafted += sum(n > 1 for c in completions for n in c.acceptance_lengths)
    assert drafted > 3
    assert answers(LLM().with_drafter(load_drafter(draft)), 8) == plain


def test_reproducible_text_is_the_same_with_and_without_it(draft):
    texts = [answers(LLM(None, each, reproducible=True), size) for each, size in ((None, 1), (draft, 8))]
    assert texts[0] == texts[1]


def test_it_goes_through_orbax_and_export(draft, tmp_path):
    opened, module = open_any(draft)
    options = {"dtype": None, "quantize": None}
    orbax.convert(opened, module, draft, tmp_path / "orbax", ONE_DEVICE, options, lambda todo: todo)
    assert_same(load_drafter(tmp_path / "orbax"), load_drafter(draft))
    raw = json.loads((draft / "config.json").read_text())
    exported = load_drafter(draft, jnp.bfloat16)
    export(exported, raw, tmp_path / "exported")
    assert_same(load_drafter(tmp_path / "exported", jnp.bfloat16), exported)


def test_the_plan_counts_its_parameters(draft):
    options = {"dtype": jnp.bfloat16, "slots": 1, "max_len": 1024, "context": 512, "acceptance_length": 3, "block": 8}
    plan = make_plan(read_shapes(str(TINY / "target"), str(draft)), ONE_DEVICE, DEVICES["h100"], **options)
    assert plan["parameters"]["drafter"] == sum(x.size for x in jax.tree.leaves(load_drafter(draft)))


def test_a_shortlist_has_tokens_of_its_head_only(plain, draft, tmp_path):
    some = sorted({int(IDS[3]), int(IDS[90]), *map(int, IDS[100:150])})
    (tmp_path / "ids.json").write_text(json.dumps([*some, *np.setdiff1d(np.arange(VOCAB), IDS)[:5].tolist()]))
    llm = LLM(None, draft, draft_tokens=tmp_path / "ids.json")
    reduced = llm.drafter.config.draft_vocab_size is not None
    assert len(llm.drafter.vocabulary.ids) == len(some) + 5 * (not reduced)
    assert answers(llm, 8) == plain
    if reduced:
        (tmp_path / "none.json").write_text(json.dumps([int(np.setdiff1d(np.arange(VOCAB), IDS)[0])]))
        with pytest.raises(InputError, match="none of the draft tokens is among the 200 of the drafter's head"):
            LLM(None, draft, draft_tokens=tmp_path / "none.json")


def with_head(path, rows: np.ndarray | None, ids: np.ndarray = IDS):
    """The bundled drafter without its selector, with a head of the tokens ``ids``.

    ``rows`` are those of the head; None for none in the files.
    """
    directory = without_selector(path)
    raw = json.loads((directory / "config.json").read_text())
    raw["dflash_config"]["draft_vocab_size"] = len(ids)
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = load_file(directory / "model.safetensors") | {"d2t": ids - np.arange(len(ids))}
    save_file(tensors if rows is None else tensors | {"lm_head.weight": rows}, directory / "model.safetensors")
    return directory


def drafted(llm) -> list:
    return [(c.token_ids, c.acceptance_lengths) for c in llm.generate(PROMPTS, PARAMS, block_size=8)]


def bytes_of(draft) -> int:
    """Of a drafter's arrays in bfloat16, which are not packed, each once."""
    leaves = jax.tree.leaves(LLM(None, draft, dtype="bfloat16").drafter)
    return sum({id(x): x.nbytes for x in leaves}.values())


def planned(draft) -> int:
    options = {"dtype": jnp.bfloat16, "slots": 1, "max_len": 1024, "context": 512, "acceptance_length": 3, "block": 8}
    shapes = read_shapes(str(TINY / "target"), str(draft))
    return make_plan(shapes, ONE_DEVICE, DEVICES["h100"], **options)["bytes_per_device"]["drafter"]


def test_a_reduced_head_of_the_targets_rows_is_a_shortlist_and_any_other_stays(tmp_path, monkeypatch):
    head = np.asarray(LLM(dtype="bfloat16").target.head_rows(jnp.asarray(IDS)))
    others = head.copy()
    others[3] *= 2
    paths = [with_head(tmp_path / name, rows) for name, rows in (("same", head), ("none", None), ("other", others))]
    (same, none, other) = (LLM(None, path) for path in paths)
    assert [llm.drafter.config.own_head for llm in (same, none, other)] == [False, False, True]
    assert [llm.drafter.vocabulary is None for llm in (same, none, other)] == [False, False, True]
    assert same.drafter.vocabulary.ids[...].tolist() == IDS.tolist()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "without_copies", lambda drafter, target, like: drafter)
        own = LLM(None, paths[0])
    assert own.drafter.config.own_head
    text = drafted(own)
    assert drafted(same) == drafted(none) == text
    assert drafted(other)[0][0] == text[0][0]
    # From memory, beside another drafter, and beside a list.
    again = LLM().with_drafter(same.drafter)
    assert not again.drafter.config.own_head
    assert drafted(again) == drafted(LLM().with_drafter(load_drafter(paths[0]))) == text
    # In memory once, as the plan counts it.
    assert {planned(path) for path in paths} == {bytes_of(path) for path in paths}
    with_list = shutil.copytree(paths[1], tmp_path / "list")
    (with_list / "draft_tokens.json").write_text(json.dumps(IDS[:50].tolist()))
    assert LLM(None, with_list).drafter.vocabulary.ids[...].tolist() == IDS[:50].tolist()
    assert bytes_of(paths[0]) - bytes_of(with_list) == (DRAFTED - 50) * 2 * HIDDEN - 50 * 4
    assert LLM(None, with_list, draft_tokens="none").drafter.vocabulary.ids[...].tolist() == IDS.tolist()


def test_a_plan_counts_the_list_in_the_drafters_directory(tmp_path):
    directory = shutil.copytree(TINY / "draft", tmp_path / "draft")
    (directory / "draft_tokens.json").write_text(json.dumps(IDS.tolist()))
    assert planned(directory) == bytes_of(directory) == planned(TINY / "draft") + DRAFTED * (2 * HIDDEN + 4)
