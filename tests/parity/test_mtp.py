"""The MTP head against its restatement around transformers' layers: drafts, and every layout on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.errors import InputError
from dflash_jax.models.cache import init_cache
from dflash_jax.models.drafting import ContextTokens, TargetHeads
from tests.float64 import assert_near
from tests.parity.mtp_reference import Head, draft_logits, in_both, tensors
from tests.parity.oracle import assert_same_parameters, randomise
from tests.parity.test_families import FAMILIES
from tests.parity.test_qwen3_5 import COMMON, DENSE, MOE

# Tokens of each row whose last is the last known one, and of each row in each call, with a call that one sits out.
LENGTHS, PIECES, SIZE = (41, 24, 9), [(7, 1, 5), (16, 0, 3), (17, 22, 0)], 22
STEPS, CAPACITY = 4, 48
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
CASES = {
    "moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(**{**MOE, **LAYERS}),
        Qwen3_5MoeDecoderLayer,
        Qwen3_5MoeRMSNorm,
    ),
    "dense": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**{**DENSE, **LAYERS}), Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "qwen3_next": (*FAMILIES["qwen3_next"][:2], Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
}


def add_tensors(path, more: dict) -> None:
    """Adds tensors to a checkpoint of one file."""
    file = path / "model.safetensors"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(model, head, directory)."""
    kind, config, layer, norm = CASES[request.param]
    model = randomise(kind(config), 1)
    head, path = Head(model, layer, norm, seed=2), tmp_path_factory.mktemp("target")
    model.save_pretrained(path, save_original_format=False)
    add_tensors(path, tensors(head))
    return model, head, path


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    return [rng.integers(0, COMMON["vocab_size"], n) for n in LENGTHS]


@jax.jit
def extended(target, mtp, state, tokens, length, n, rotary):
    """The caches of target and head after ``n`` more of the tokens [B, SIZE] of each row."""
    caches, cache = state
    embeddings, steps = target.embed_tokens(tokens), jnp.arange(SIZE)[None]
    _, features, caches = target.extend(embeddings, caches, length, n, mtp.taps, rotary)
    new = ContextTokens(tokens, embeddings, features, length[:, None] + steps, rotary, steps < n[:, None])
    return caches, mtp.extend(cache, new)


def context(target, mtp, rows, rotary):
    """The head's cache of all rows but their last tokens. Padding is of real tokens, which must not reach others."""
    b = len(rows)
    state = (init_cache(target.config, b, CAPACITY, jnp.float32), mtp.init_cache(b, CAPACITY, jnp.float32))
    length = np.zeros(b, np.int32)
    for sizes in PIECES:
        assert max(sizes) <= SIZE
        at = np.minimum(length[:, None] + np.arange(SIZE), [[len(row) - 1] for row in rows])
        tokens = np.stack([row[i] for row, i in zip(rows, at, strict=True)])
        n, where = jnp.asarray(sizes, jnp.int32), jnp.asarray(np.moveaxis(rotary[np.arange(b)[:, None], :, at], 2, 0))
        state = extended(target, mtp, state, jnp.asarray(tokens, jnp.int32), jnp.asarray(length), n, where)
        # Not in place: JAX may still read the old array.
        length = length + np.asarray(sizes, np.int32)
    assert tuple(length + 1) == tuple(map(len, rows))
    return state[1]


@jax.jit
def steps(target, mtp, cache, last, start, drafts):
    """Logits [B, K, V] of the head's steps, which draw the given ``drafts`` [B, K]."""
    seen = []

    def draw(logits, positions, ids=None):
        seen.append(logits)
        return drafts[:, len(seen) - 1 : len(seen)]

    heads = TargetHeads(target.embed_tokens, target.logits, draw, lambda *_: None)
    mtp.propose(cache, last, start, jnp.full_like(last, STEPS + 1), STEPS + 1, heads)
    return jnp.concatenate(seen, 1)


def rotary_positions(kind: str) -> np.ndarray:
    """int [rows, 3, positions]."""
    text = np.broadcast_to(np.arange(CAPACITY), (len(LENGTHS), 3, CAPACITY))
    return text if kind == "text" else np.random.default_rng(5).integers(0, 60, text.shape)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_drafts_equal_those_without_caches(kind, case, rows):
    """Odd pieces of unequal rows, with rotary positions of text and with three rows of them."""
    model, head, path = case
    if kind == "image" and "mrope_section" not in model.config.rope_parameters:
        return
    target, mtp = load_target(path), load_drafter(path)
    rotary = rotary_positions(kind)
    drafts = np.random.default_rng(4).integers(0, COMMON["vocab_size"], (len(rows), STEPS))
    last, start = (jnp.asarray(x, jnp.int32) for x in ([row[-1] for row in rows], [len(row) - 1 for row in rows]))
    cache = context(target, mtp, rows, rotary)
    got = steps(target, mtp, cache, last, start, jnp.asarray(drafts, jnp.int32))
    for i, row in enumerate(rows):
        want = in_both(draft_logits, model, head, row, drafts[i], rotary[i, :, : len(row) - 1])
        assert_near(np.asarray(got[i]), want, f"{len(row)} tokens")


def test_per_expert_and_stacked_experts_are_the_same_head(case, tmp_path):
    """The head's experts may be stored otherwise than the target's."""
    model, head, path = case
    model.save_pretrained(tmp_path, save_original_format=False)
    add_tensors(tmp_path, tensors(head, per_expert=True))
    assert len(tensors(head)) == (15 if not hasattr(model.config, "num_experts") else 19)
    assert_same_parameters(load_drafter(tmp_path), load_drafter(path))


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight", "mtp.norm.weight"])
def test_a_head_that_lacks_a_tensor_is_refused_by_its_name(name, case, tmp_path):
    model, head, _ = case
    model.save_pretrained(tmp_path)
    add_tensors(tmp_path, {n: x for n, x in tensors(head).items() if n != name})
    with pytest.raises(InputError, match=f"missing '{name}'"):
        load_drafter(tmp_path)
    # The target alone is whole.
    load_target(tmp_path)


def test_a_target_without_a_head_is_refused_as_drafter(case, tmp_path):
    case[0].save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no MTP head: none of its tensors begins with mtp\.$"):
        load_drafter(tmp_path)
