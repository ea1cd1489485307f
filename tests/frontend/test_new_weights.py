"""New weights in a running LLM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.config_files import read_raw
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import open_drafter, open_target, save_module, tensors_of
from dflash_jax.errors import EngineError, UnavailableError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.packing import unpack_weights
from dflash_jax.parallel.sharding import parameter_paths
from tests.vision_checkpoint import write_vision_checkpoint

PROMPTS = ["def main(", "import os\nimport", "x"]
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=64, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    """The bundled pair, on kernels whose programs do not depend on the weights' values."""
    return LLM(kernels="xla", dtype="float32")


@pytest.fixture(scope="module")
def files(llm):
    files = TensorFiles(llm.directory)
    return {name: np.array(files.read(name)) for name in files}


def changed(module, seed=0):
    """A module with other numbers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x * (1 + 0.2 * rng.standard_normal(x.shape).astype(x.dtype)), unpack_weights(module))


def tensors(llm, module):
    entries = open_target(llm.directory).entries
    return tensors_of(module, entries)


@pytest.fixture(scope="module")
def other(llm):
    return changed(llm.target)


@pytest.fixture(scope="module")
def second(llm, other, tmp_path_factory):
    """The directory of an LLM that begins with the other weights."""
    directory = tmp_path_factory.mktemp("other") / "target"
    for path in llm.directory.iterdir():
        if path.suffix != ".safetensors":
            directory.mkdir(exist_ok=True)
            (directory / path.name).write_bytes(path.read_bytes())
    save_module(other, open_target(llm.directory).entries, read_raw(llm.directory), directory, np.float32)
    return directory


@pytest.fixture(scope="module")
def fresh(llm, second):
    """An LLM that begins with the other weights."""
    return LLM(second, draft=TINY / "draft", kernels="xla", dtype="float32")


@pytest.fixture(autouse=True)
def first_weights(llm, files):
    yield
    llm.resume()
    llm.update_weights(files)


def texts(llm, params=GREEDY, prompts=PROMPTS, **options):
    return [completion.token_ids for completion in llm.generate(prompts, params, **options)]


FORMS = {
    "module": lambda llm, other, directory: other,
    "our names": lambda llm, other, _: dict(zip(parameter_paths(other), jax.tree.leaves(other), strict=True)),
    "names": lambda llm, other, _: tensors(llm, other),
    "pairs": lambda llm, other, _: iter(tensors(llm, other).items()),
    "names of jax": lambda llm, other, _: {k: jnp.asarray(v) for k, v in tensors(llm, other).items()},
    "names of torch": lambda llm, other, _: {k: torch.tensor(v) for k, v in tensors(llm, other).items()},
    "directory": lambda llm, other, directory: directory,
    "its path": lambda llm, other, directory: str(directory),
}


@pytest.mark.parametrize("form", FORMS)
def test_new_weights_are_those_of_a_fresh_llm_and_nothing_is_compiled(llm, other, second, fresh, form):
    before, plain = texts(llm, block_size=16), texts(llm, block_size=1)
    compiled = [dict(programs.compiled) for programs in (llm.programs, llm.plain_programs)]
    llm.update_weights(FORMS[form](llm, other, second))
    assert texts(llm, block_size=16) == texts(fresh, block_size=16) != before
    assert texts(llm, block_size=1) == texts(fresh, block_size=1) != plain
    for programs, known in zip((llm.programs, llm.plain_programs), compiled, strict=True):
        assert all(programs.compiled[key] is program for key, program in known.items())


def test_the_same_weights_change_no_token_and_prefixes_are_forgotten(llm, files):
    prompt = "import os\n" * 60
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].cached_tokens > 0
    before = texts(llm, SAMPLED)
    llm.update_weights(files)
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0
    assert texts(llm, SAMPLED) == before


def test_what_is_given_may_change_and_be_freed_afterwards(llm, other, fresh):
    arrays = [jnp.array(x) for x in jax.tree.leaves(other)]
    llm.update_weights(jax.tree.unflatten(jax.tree.structure(other), arrays))
    for array in arrays:
        array.delete()
    assert texts(llm) == texts(fresh)
    given = {name: array.copy() for name, array in tensors(llm, other).items()}
    llm.update_weights(given)
    for array in given.values():
        array.fill(0)
    assert texts(llm) == texts(fresh)


@pytest.mark.parametrize("block_size", [1, 16])
def test_requests_under_way_go_on_under_the_new_weights(llm, fresh, other, block_size):
    pieces = llm.pieces(PROMPTS[0], SAMPLED, block_size)
    begun = [next(pieces) for _ in range(2)]
    held = [token for piece in begun for token in piece.token_ids]
    llm.update_weights(other, version="policy 7")
    completion = list(pieces)[-1]
    (first, second) = completion.weight_versions
    assert (first.start, first.end, second.end) == (0, second.start, 64)
    assert second.version == "policy 7" != first.version
    assert completion.token_ids[: len(held)] == held
    # A new model that is given the old tokens draws the same ones after them.
    prompt, drawn = completion.prompt_ids, completion.token_ids
    rest = SamplingParams(max_tokens=64 - second.start, temperature=0.9, seed=5, ignore_eos=True)
    assert texts(fresh, rest, [prompt + drawn[: second.start]])[0] == drawn[second.start :]


def test_requests_under_way_are_finished_first(llm, fresh, other):
    expected = texts(llm, SAMPLED, PROMPTS[:1])[0]
    pieces = llm.pieces(PROMPTS[0], SAMPLED)
    next(pieces)
    llm.update_weights(other, in_flight="wait")
    completion = list(pieces)[-1]
    assert completion.token_ids == expected
    assert len(completion.weight_versions) == 1
    assert texts(llm) == texts(fresh)


def test_requests_under_way_are_aborted_with_their_tokens(llm, other):
    expected = texts(llm, SAMPLED, PROMPTS[:1])[0]
    pieces = llm.pieces(PROMPTS[0], SAMPLED)
    next(pieces)
    llm.update_weights(other, in_flight="abort")
    completion = list(pieces)[-1]
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 64
    assert completion.token_ids == expected[: len(completion.token_ids)]


def test_a_part_of_a_continuation_goes_on_as_a_prompt(llm):
    whole = texts(llm, SAMPLED, PROMPTS[:1])[0]
    part = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True))[0]
    rest = SamplingParams(max_tokens=44, temperature=0.9, seed=5, ignore_eos=True)
    assert part.token_ids + texts(llm, rest, [part.prompt_ids + part.token_ids])[0] == whole


def test_a_few_tensors_change_alone(llm, files, other, fresh):
    new = tensors(llm, other)
    names = list(new)
    for start in range(0, len(names), 7):
        llm.update_weights({name: new[name] for name in names[start : start + 7]}, partial=True)
    assert texts(llm) == texts(fresh)
    paths = dict(zip(parameter_paths(other), jax.tree.leaves(other), strict=True))
    llm.update_weights(files)
    for path, leaf in paths.items():
        llm.update_weights({path: leaf}, partial=True)
    assert texts(llm) == texts(fresh)


NAME = "model.layers.0.input_layernorm.weight"
WRONG = {
    "a missing name": (lambda f: {k: v for k, v in f.items() if k != NAME}, f"missing '{NAME}'"),
    "an unknown name": (lambda f: f | {"x.weight": f[NAME]}, "unexpected 'x.weight'"),
    "a wrong shape": (lambda f: f | {NAME: f[NAME][:3]}, "has shape \\[3\\], it must be"),
    "a wrong dtype": (lambda f: f | {NAME: f[NAME].astype(np.int32)}, "it must have floating-point numbers"),
    "a jax array of a wrong dtype": (lambda f: f | {NAME: jnp.zeros(f[NAME].shape, int)}, "floating-point numbers"),
    "no array": (lambda f: f | {NAME: "a"}, "it must be an array"),
    "objects": (lambda f: f | {NAME: np.array([None])}, "it must be an array"),
    "a name twice": (lambda f: [*f.items(), (NAME, f[NAME])], "twice"),
    "no pairs": (lambda f: list(f), "a name with an array"),
    "names that are no text": (lambda f: {1: f[NAME]}, "a name with an array"),
    "nothing": (lambda f: {}, "missing"),
    "a number": (lambda f: 3, "it must be a module"),
    "bytes": (lambda f: b"abc", "it must be a module"),
    "no directory": (lambda f: "/nowhere", "does not exist"),
    "our names, one missing": (lambda f: {"embed": f["model.embed_tokens.weight"]}, "missing"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_named_and_change_nothing(llm, files, what):
    wrong, message = WRONG[what]
    before, version = texts(llm), llm.weight_version
    pieces = llm.pieces(PROMPTS[0], GREEDY)
    next(pieces)
    with pytest.raises(InputError, match=message):
        llm.update_weights(wrong(files), in_flight="abort")
    assert list(pieces)[-1].token_ids == before[0]
    assert (texts(llm), llm.weight_version) == (before, version)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": "drop"}, "in_flight is 'drop'"),
        ({"version": 3}, "version is 3"),
        ({"version": "x" * 300}, "1 to 256 characters"),
        ({"version": ""}, "1 to 256 characters"),
        ({"drafter": 3}, "drafter is 3"),
        ({"drafter": {"nobody": 1}}, "nobody"),
    ],
)
def test_wrong_options_are_named(llm, files, options, message):
    with pytest.raises(InputError, match=message):
        llm.update_weights(files, **options)
    with pytest.raises(InputError, match="give one of them"):
        llm.update_weights()


def test_a_module_of_another_model_is_refused(llm):
    smaller = LLM(kernels="xla", hf_overrides={"rms_norm_eps": 1e-3}).target
    with pytest.raises(InputError, match=r"is of another model: norm_eps differs"):
        llm.update_weights(smaller)


def test_the_models_cannot_be_set(llm):
    with pytest.raises(AttributeError, match="update_weights"):
        llm.target = llm.target
    with pytest.raises(AttributeError, match="update_weights"):
        llm.drafters = ()


def test_tensors_are_read_by_name(llm, files, other):
    names = [name for name in files if not name.startswith("mtp.")]
    for name, array in llm.read_weights(names).items():
        np.testing.assert_array_equal(array, files[name].astype(np.float32))
    llm.update_weights(other)
    np.testing.assert_array_equal(llm.read_weights([NAME])[NAME], tensors(llm, other)[NAME])
    with pytest.raises(InputError, match="'x' is no tensor"):
        llm.read_weights(["x"])


def test_the_vision_tower_stays(tmp_path):
    write_vision_checkpoint(tmp_path)
    llm, files = LLM(tmp_path, draft=None, kernels="xla"), TensorFiles(tmp_path)
    tensors = {name: np.array(files.read(name)) for name in files}
    tower = [name for name in tensors if ".visual." in name]
    for weights in (tensors, tmp_path, {name: tensors[name] for name in tensors if name not in tower}):
        llm.update_weights(weights)
    with pytest.raises(InputError, match="vision tower are others"):
        llm.update_weights(tensors | {tower[0]: tensors[tower[0]] * 2})
    other = llm.with_programs(llm.programs)
    llm.sleep(2)
    # An LLM of the same models has its own.
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(other.encoder.tower))
    with pytest.raises(UnavailableError, match="sleeps"):
        llm.encoder._compute({})
    llm.update_weights(tensors)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(llm.encoder.tower))


class TestDrafter:
    """The drafter's weights: they change no text."""

    @pytest.mark.parametrize("form", ["module", "names", "directory", "by the drafter's name"])
    def test_it_is_replaced_in_every_form(self, llm, form, tmp_path):
        new, plain = changed(llm.drafter, 1), texts(llm)
        lengths = [completion.acceptance_lengths for completion in llm.generate(PROMPTS, GREEDY, block_size=16)]
        source = llm.loader.checkpoint.drafts[0]
        entries = open_drafter(source).entries
        directory = tmp_path / "draft"
        save_module(
            new, [e for e in entries if e.path in parameter_paths(new)], read_raw(source), directory, np.float32
        )
        given = {"module": new, "directory": directory, "by the drafter's name": {llm.draft_names[0]: new}}
        read = TensorFiles(directory)
        given["names"] = {name: np.array(read.read(name)) for name in read}
        old = unpack_weights(llm.drafter)
        llm.update_weights(drafter=given[form])
        drafted = llm.generate(PROMPTS, GREEDY, block_size=16)
        assert [completion.token_ids for completion in drafted] == plain
        assert [completion.acceptance_lengths for completion in drafted] != lengths
        llm.update_weights(drafter=old)
        drafted = llm.generate(PROMPTS, GREEDY, block_size=16)
        assert [completion.acceptance_lengths for completion in drafted] == lengths

    def test_an_llm_without_one_refuses_one(self, llm):
        alone = LLM(draft=None, kernels="xla")
        with pytest.raises(InputError, match="there is no drafter"):
            alone.update_weights(drafter=unpack_weights(llm.drafter))

    def test_that_of_another_llm_of_the_target_stays(self, llm, other):
        second = llm.with_drafter(changed(llm.drafter, 2))
        before = texts(second)
        llm.update_weights(other)
        assert texts(second) == before
        second.update_weights(other)
        assert texts(second) == texts(llm)


def test_weights_are_not_replaced_while_requests_are_to_be_finished_in_a_pause(llm, files):
    pieces = llm.pieces(PROMPTS[0], GREEDY)
    next(pieces)
    llm.pause()
    version = llm.weight_version
    with pytest.raises(EngineError, match="paused"):
        llm.update_weights(files, in_flight="wait")
    assert llm.weight_version == version
    llm.resume()
    assert list(pieces)[-1].finish_reason == "length"


def test_a_listed_vocabulary_of_a_drafter_has_the_rows_of_the_new_head(tmp_path):
    """On kernels that pack weights, too, for which the drafter is compared with the one before."""
    ids = list(range(3, 400, 2))
    (tmp_path / "ids.json").write_text(str(ids))
    llm = LLM(dtype="float32", draft_tokens=tmp_path / "ids.json")
    target, drafter = changed(llm.target), changed(llm.drafter)
    drafter.vocabulary = nnx.data(None)
    wanted = np.asarray(target.head_rows(jnp.asarray(ids)))
    for given in ({"drafter": drafter}, {"drafter": TINY / "draft"}, {}):
        llm.update_weights(target, **given)
        assert llm.drafter.vocabulary.ids[...].tolist() == ids
        np.testing.assert_array_equal(unpack_weights(llm.drafter.vocabulary).head[...], wanted)
    plain = llm.generate(PROMPTS[:1], GREEDY, block_size=1)
    drafted = llm.generate(PROMPTS[:1], GREEDY, block_size=4)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
