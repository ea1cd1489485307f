"""Makes the bundled pair from nothing: tokenizer, target, regenerated answers, drafter. Run the stages in this order:

    python scripts/make_tiny_pair.py tokenizer
    python scripts/make_tiny_pair.py target
    python scripts/make_tiny_pair.py regenerate
    python scripts/make_tiny_pair.py drafter

Each reads what the one before left in --out (default: the package's assets) and --work. Corpus: the running Python's standard
library; every twentieth file, by a hash of its name, is held out of everything.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from dflash_jax.checkpoint.load import load_target, save_module
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.families import qwen3_5
from dflash_jax.training.data import conversations, standard_library, windows
from dflash_jax.training.step import make_step, next_token_loss, optimiser
from dflash_jax.training.tokenizer import save_tokenizer, train_tokenizer

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


def token_stream(documents, directory: Path, seed: int) -> np.ndarray:
    """Documents and chats in random order, each ended by <|endoftext|>."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [d.text for d in documents] + chat_texts(documents, directory)
    order = np.random.default_rng(seed).permutation(len(texts))
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces = tokenizer.encode_batch([texts[i] for i in order], add_special_tokens=False)
    return np.concatenate([np.array([*p.ids, end], np.int32) for p in pieces])


def bits_per_byte(model, documents, directory: Path, length: int = 512) -> float:
    """Held-out cross-entropy in windows of ``length`` tokens, the first token of each given; per byte of the text predicted."""
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
    stream = token_stream(train, directory, args.seed)
    print(f"{len(stream)} training tokens, jax devices {jax.devices()}", flush=True)
    config = qwen3_5.read_config(TARGET)
    model = Decoder(config, rngs=nnx.Rngs(args.seed))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "dflash_jax" / "assets" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    {"tokenizer": stage_tokenizer, "target": stage_target}[args.stage](args)


if __name__ == "__main__":
    main()
