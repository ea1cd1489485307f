"""MTP heads in directories of their own: the drafts are those of the same head in the target's files, to the bit."""

import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.load import check_drafter, check_target, load_drafter, read_draft_config
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.options.train import TrainConfig
from dflash_jax.parallel.devices import DEVICES
from dflash_jax.parallel.sharding import ONE_DEVICE, parameter_paths
from dflash_jax.planner import make_plan, read_shapes
from dflash_jax.training.drafters import export, raw_config, starting_drafter

PROMPTS = ["def read_config(path):\n", "import json\nfor line in file:\n    "]
PARAMS = [
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=40),
    SamplingParams(temperature=0.9, seed=4, ignore_eos=True, max_tokens=40, frequency_penalty=0.3, top_p=0.9),
]
RAW = json.loads((TINY / "target" / "config.json").read_text())
TENSORS = {
    name: array for path in sorted((TINY / "target").glob("*.safetensors")) for name, array in load_file(path).items()
}
HEAD = {name: array for name, array in TENSORS.items() if name.startswith("mtp.")}
TEXT = RAW.get("text_config", RAW)
VERIFIER = {"name_or_path": "Qwen/Qwen3.6-35B-A3B", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
# As `speculators.convert.mtp` renames them.
EXACT = {"mtp.fc.weight": "input_proj.weight", "mtp.norm.weight": "final_layernorm.weight"}
BEGINNINGS = {"mtp.pre_fc_norm_hidden.": "hidden_layernorm.", "mtp.pre_fc_norm_embedding.": "token_layernorm."}


def speculators(**changes) -> tuple[dict, dict]:
    def renamed(name: str) -> str:
        for old, new in (EXACT | BEGINNINGS | {"mtp.layers.0.": ""}).items():
            if name.startswith(old):
                return f"mtp_layers.0.{new}{name.removeprefix(old)}"
        raise AssertionError(name)

    raw = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": TEXT | {"model_type": f"{RAW['model_type'].removesuffix('_text')}_text"},
        "speculators_config": {"algorithm": "mtp", "proposal_methods": [], "verifier": VERIFIER},
    }
    return raw | changes, {renamed(name): array for name, array in HEAD.items()}


def mlx(**changes) -> tuple[dict, dict]:
    """Norms have one added, and the experts' matrices are stacked alone."""
    raw = {"model_type": "qwen3_5_mtp", "text_config": TEXT, "block_size": 3, "tie_word_embeddings": True}
    tensors = {}
    for name, array in HEAD.items():
        name = name.removeprefix("mtp.")
        if re.search(r"norm(_\w+)?\.weight$", name):
            array = array.astype(np.float32) + 1
        if name.endswith(".experts.gate_up_proj"):
            for part, matrix in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                at = name.replace("experts.gate_up_proj", f"switch_mlp.{part}_proj.weight")
                tensors[at] = np.ascontiguousarray(matrix)
            continue
        tensors[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = array
    return raw | changes, tensors


def copies() -> dict:
    return {name: array for name, array in TENSORS.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}


LAYOUTS = {
    "the target's": lambda: (RAW, HEAD),
    "another prefix": lambda: (RAW, {f"model.{name}": array for name, array in HEAD.items()}),
    "beside copies of the target's tables": lambda: (RAW, HEAD | copies()),
    "speculators": speculators,
    "mlx-vlm": mlx,
}


def written(layout: tuple[dict, dict], path):
    raw, tensors = layout
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The bundled target without its head."""
    path = tmp_path_factory.mktemp("without") / "target"
    shutil.copytree(TINY / "target", path, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    save_file({name: array for name, array in TENSORS.items() if name not in HEAD}, path / "model.safetensors")
    return path


def answers(llm) -> list:
    completions = llm.generate(PROMPTS, PARAMS, block_size=4)
    return [(completion.token_ids, completion.acceptance_lengths) for completion in completions]


@pytest.fixture(scope="module")
def own():
    llm = LLM(None, "mtp")
    return llm.drafter, answers(llm)


def assert_same(found, expected) -> None:
    assert found.config == expected.config
    assert parameter_paths(found) == parameter_paths(expected)
    for path, a, b in zip(parameter_paths(found), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_alone_drafts_as_in_the_targets_files(name, own, without, tmp_path):
    path = written(LAYOUTS[name](), tmp_path / "head")
    head, expected = own
    # Over a target without a head, and over one with a head.
    for target in (without, None):
        llm = LLM(target, path)
        assert_same(llm.drafter, head)
    assert answers(llm) == expected
    assert sum(n > 1 for _, lengths in expected for n in lengths) > 3
    options = {"dtype": llm.target.norm.weight.dtype, "slots": 1, "max_len": 64, "context": 32, "block": 4}
    plans = [
        make_plan(
            read_shapes(str(TINY / "target"), str(d)), ONE_DEVICE, DEVICES["h100"], acceptance_length=2, **options
        )
        for d in (path, TINY / "target")
    ]
    assert plans[0] == plans[1]


def test_a_target_without_a_head_names_what_it_lacks(without):
    with pytest.raises(InputError, match="has no MTP head"):
        LLM(without, "mtp")


def test_a_head_alone_wants_its_targets_norm_and_is_no_target(tmp_path):
    path = written(speculators(), tmp_path / "head")
    with pytest.raises(InputError, match="is an MTP head alone: give its target's final_norm, too"):
        load_drafter(path)
    with pytest.raises(InputError, match="this is an MTP head alone: give it as the draft, not as the target"):
        check_target(path)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_tables_that_are_not_the_targets_are_refused(name, tmp_path):
    table = next(array for each, array in copies().items() if each.endswith(name)).copy()
    whole = {name: table}
    LLM(None, written((RAW, HEAD | whole), tmp_path / "copy"))
    LLM(None, written((RAW, HEAD | {name: table.astype(np.float32)}), tmp_path / "wider"))
    table[-1, -1] += ml_dtypes.bfloat16(1)
    with pytest.raises(InputError, match=f"has '{name}', which is not the target's"):
        LLM(None, written((RAW, HEAD | whole), tmp_path / "other"))
    with pytest.raises(InputError, match=f"has '{name}', which is not the target's"):
        LLM(None, written((RAW, HEAD | {name: table[:-1]}), tmp_path / "shorter"))
    with pytest.raises(InputError, match=f"has '{name}', which is not the target's"):
        LLM(None, written((RAW, HEAD | {name: np.zeros((), np.float32)}), tmp_path / "number"))


WRONG_KEYS = {
    "num_nextn_predict_layers is 2: only MTP heads of one layer": speculators(num_nextn_predict_layers=2),
    "transformer_layer_config is 3: it must be an object": speculators(transformer_layer_config=3),
    "new_key is 3": speculators(new_key=3),
    "model_type 'qwen3' has no MTP head": speculators(transformer_layer_config=TEXT | {"model_type": "qwen3"}),
    "speculators_model_type is 'eagle3': known are dflash, dflash2, dspark, mtp": speculators(
        speculators_model_type="eagle3", architectures=["Eagle3Speculator"]
    ),
    "hidden size is 96": speculators(transformer_layer_config=TEXT | {"model_type": "qwen3_5_moe", "hidden_size": 96}),
    "quantization is {.*: the key is not known": mlx(quantization={"bits": 4, "group_size": 64}),
    "text_config is 3": mlx(text_config=3),
}


@pytest.mark.parametrize("says", WRONG_KEYS)
def test_a_wrong_key_of_a_head_alone_is_named(says, tmp_path):
    with pytest.raises(InputError, match=says):
        check_drafter(written(WRONG_KEYS[says], tmp_path / "head"), LLM(None, None).config)


@pytest.mark.parametrize("name", ["mtp.other.weight", "other.weight", "mtp.embed_tokens.weight", "model.visual.x"])
def test_a_tensor_that_a_head_alone_does_not_use_is_named(name, tmp_path):
    path = written((RAW, HEAD | {name: np.zeros(3, np.float32)}), tmp_path / "head")
    with pytest.raises(InputError, match=f"unexpected '{name}'"):
        check_drafter(path, LLM(None, None).config)


def test_a_head_alone_is_trained_on_and_exported(own, tmp_path):
    path, llm = written(speculators(), tmp_path / "head"), LLM(None, None)
    config = TrainConfig(data=("x",), output="y", mtp=True, draft=str(path))
    raw = raw_config(config, llm)
    head = starting_drafter(config, raw, llm.target, llm.directory)
    assert head.config == own[0].config
    export(head, raw, tmp_path / "exported")
    assert read_draft_config(tmp_path / "exported") == head.config
    assert_same(LLM(None, tmp_path / "exported").drafter, own[0])
