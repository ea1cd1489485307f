"""Makes the bundled pair from nothing: tokenizer, target, regenerated answers, drafter. Run the stages in this order:

    python scripts/make_tiny_pair.py tokenizer
    python scripts/make_tiny_pair.py target
    python scripts/make_tiny_pair.py regenerate
    python scripts/make_tiny_pair.py drafter
    python scripts/make_tiny_pair.py evaluate

Each reads what the one before left in --out (default: the package's assets) or --work. Corpus: the running Python's
standard library; every twentieth file, by a hash of its name, is held out of everything.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from dflash_jax.checkpoint.load import load_drafter, load_target, save_module
from dflash_jax.llm import LLM
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.families import dflash, qwen3_5
from dflash_jax.params import SamplingParams
from dflash_jax.training.data import conversations, standard_library, windows
from dflash_jax.training.draft import draft_loss
from dflash_jax.training.evaluation import held_out_prompts, measure
from dflash_jax.training.step import make_step, next_token_loss, optimiser
from dflash_jax.training.tokenizer import SPECIAL, save_tokenizer, train_tokenizer

VOCABULARY = 2048
MAX_POSITIONS = 8192
TARGET = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 160,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "num_target_layers": 8,
    "block_size": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "use_sliding_window": True,
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": SPECIAL.index("<|mask|>"), "target_layer_ids": [1, 3, 5, 7]},
}
SEQUENCE = 256


def render(tokenizer, chat: list[dict], thinking: bool) -> str:
    ask, answer = chat
    name = ask["content"].split("`")[1]
    thought = f"A short function, `{name}`, is enough." if thinking else ""
    reasoning = {**answer, "reasoning_content": thought}
    return tokenizer.apply_chat_template([ask, reasoning], tokenize=False)


def chat_texts(documents, directory: Path) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [render(tokenizer, chat, i % 2 == 0) for i, chat in enumerate(conversations(documents))]


def token_stream(documents, args) -> np.ndarray:
    """Documents and chats in random order, each ended by <|endoftext|>; made once, then kept in --work."""
    kept = args.work / f"stream-{args.seed}.npy"
    if kept.exists():
        return np.load(kept)
    directory = args.out / "target"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [d.text for d in documents] + chat_texts(documents, directory)
    order = np.random.default_rng(args.seed).permutation(len(texts))
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces = tokenizer.encode_batch([texts[i] for i in order], add_special_tokens=False)
    stream = np.concatenate([np.array([*p.ids, end], np.int32) for p in pieces])
    np.save(kept, stream)
    return stream


def bits_per_byte(model, documents, directory: Path, length: int = 512) -> float:
    """Held-out cross-entropy in windows of ``length`` tokens, the first token of each given; per byte of the text
    predicted."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = np.concatenate([np.array(e.ids) for e in tokenizer.encode_batch([d.text for d in documents])])
    rows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1).astype(np.int32)
    loss = jax.jit(next_token_loss)
    nats = np.mean([float(loss(model, row[None])) for row in rows]) * rows.shape[0] * length
    predicted = sum(len(tokenizer.decode(row[1:].tolist(), skip_special_tokens=False).encode()) for row in rows)
    return nats / np.log(2) / predicted


def stage_tokenizer(args) -> None:
    train, _ = standard_library()
    save_tokenizer(train_tokenizer((d.text for d in train), VOCABULARY), args.out / "target", MAX_POSITIONS)


def stage_target(args) -> None:
    directory = args.out / "target"
    train, held_out = standard_library()
    stream = token_stream(train, args)
    print(f"{len(stream)} training tokens, jax devices {jax.devices()}", flush=True)
    config = qwen3_5.read_config(TARGET)
    model = load_target(directory) if args.resume else Decoder(config, rngs=nnx.Rngs(args.seed))
    transformation = optimiser(args.lr, args.steps, "muon")
    state, step = transformation.init(model), make_step(next_token_loss, transformation)
    began, losses = time.time(), []
    for i, batch in enumerate(windows(stream, 512, args.rows, args.steps, args.seed), 1):
        model, state, loss = step(model, state, jnp.asarray(batch))
        losses.append(float(loss))
        if i % 50 == 0 or i == args.steps:
            print(
                f"step {i} loss {np.mean(losses[-50:]):.4f} {i * batch[:, 1:].size / (time.time() - began):.0f} tok/s",
                flush=True,
            )
        if i % 500 == 0 or i == args.steps:
            save_module(model, qwen3_5.weight_names(config), TARGET, directory)
            print(
                f"step {i} held-out bits per byte {bits_per_byte(load_target(directory), held_out, directory):.4f}",
                flush=True,
            )


def stage_regenerate(args) -> None:
    """The target's own continuations of training text: what the drafter must learn to foresee."""
    directory = args.out / "target"
    train, _ = standard_library()
    llm, rng = LLM(directory), np.random.default_rng(args.seed)
    stream = token_stream(train, args)
    temperatures = [0.0, 0.5, 0.7, 1.0]
    tokens, mask, began = [], [], time.time()
    for done in range(0, args.sequences, 32):
        cuts = rng.integers(0, len(stream) - SEQUENCE, 32)
        prompts = [stream[c : c + rng.integers(16, 96)].tolist() for c in cuts]
        params = [
            SamplingParams(
                temperature=temperatures[i % 4], max_tokens=SEQUENCE - len(p), seed=done + i, ignore_eos=True
            )
            for i, p in enumerate(prompts)
        ]
        for completion in llm.generate(prompts, params):
            tokens.append(completion.prompt_ids + completion.token_ids)
            mask.append([False] * len(completion.prompt_ids) + [True] * len(completion.token_ids))
        print(f"{len(tokens)} sequences, {len(tokens) * SEQUENCE / (time.time() - began):.0f} tok/s", flush=True)
        np.savez_compressed(args.work / "regenerated.npz", tokens=np.array(tokens, np.int32), mask=np.array(mask))


def draft_batches(args):
    """Yields (tokens, loss mask): three quarters the target's own text, one quarter what people wrote."""
    data = np.load(args.work / "regenerated.npz")
    train, _ = standard_library()
    written = windows(token_stream(train, args), SEQUENCE - 1, args.rows, args.steps, args.seed)
    rng, order = np.random.default_rng(args.seed), np.zeros((0,), int)
    for people in written:
        if len(order) < args.rows:
            order = rng.permutation(len(data["tokens"]))
        mine, order = order[: args.rows], order[args.rows :]
        tokens, mask = data["tokens"][mine].copy(), data["mask"][mine].copy()
        quarter = args.rows // 4
        tokens[:quarter], mask[:quarter] = people[:quarter], True
        yield jnp.asarray(tokens), jnp.asarray(mask)


def stage_drafter(args) -> None:
    directory = args.out / "target"
    target, config = load_target(directory), dflash.read_config(DRAFT)
    fresh = not args.resume
    model = Drafter(config, rngs=nnx.Rngs(args.seed)) if fresh else load_drafter(args.out / "draft", jnp.float32)
    transformation = optimiser(args.lr, args.steps, "muon")
    state = transformation.init(model)
    step = make_step(partial(draft_loss, anchors=args.anchors), transformation)
    began, losses = time.time(), []
    for i, (tokens, mask) in enumerate(draft_batches(args), 1):
        key = jax.random.fold_in(jax.random.key(args.seed), i)
        model, state, loss = step(model, state, target, tokens, mask, key)
        losses.append(float(loss))
        if i % 50 == 0 or i == args.steps:
            print(f"step {i} loss {np.mean(losses[-50:]):.4f} {(time.time() - began) / i:.2f} s/step", flush=True)
        if i % 500 == 0 or i == args.steps:
            save_module(model, dflash.weight_names(config), DRAFT, args.out / "draft")


def stage_evaluate(args) -> None:
    directory = args.out / "target"
    _, held_out = standard_library()
    llm = LLM(directory, args.out / "draft")
    streams = [llm.encode(d.text) for d in held_out]
    print(f"held-out bits per byte {bits_per_byte(llm.target, held_out, directory):.4f}", flush=True)
    prompts = held_out_prompts(streams, 96, 64, args.seed)
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=160, seed=args.seed)
        for block in (16, 8, 4):
            print(f"temperature {temperature} block {block} {measure(llm, prompts, params, block)}", flush=True)


def main() -> None:
    stages = {
        "tokenizer": stage_tokenizer,
        "target": stage_target,
        "regenerate": stage_regenerate,
        "drafter": stage_drafter,
        "evaluate": stage_evaluate,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "dflash_jax" / "assets" / "tiny")
    parser.add_argument("--work", type=Path, default=Path("tiny_pair_work"), help="where regenerated text goes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400, help="of target or drafter training")
    parser.add_argument("--rows", type=int, default=4, help="sequences a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the weights in --out, under a fresh schedule")
    parser.add_argument("--sequences", type=int, default=1600, help="to regenerate")
    parser.add_argument("--anchors", type=int, default=32, help="of a sequence, a step")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args)


if __name__ == "__main__":
    main()
