"""Makes the bundled pair from nothing: tokenizer, target, regenerated answers, drafter, its selector, an MTP head.

    python scripts/bundled/make_tiny_pair.py tokenizer target regenerate drafter polish selector head record evaluate
    python scripts/bundled/make_tiny_pair.py compare

Each stage reads what the one before left in --out (default: the package's assets) or --work, so they may also be run
one by one. Corpus: the running Python's standard library; every twentieth file, by a hash of its name, is held out of
everything.

    python scripts/bundled/make_tiny_pair.py long-target long-drafter long-evaluate

trains a copy of the pair further, on rows of 8,192 and then of 32,768 tokens. The copy is WORK/long/target and
WORK/long/draft, and is not part of the package.
"""

import argparse
import json
import shutil
import time
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from dflash_jax.checkpoint.files import TensorFiles, write_json, write_tensors
from dflash_jax.checkpoint.load import load_drafter, load_target, save_module
from dflash_jax.frontend.llm import LLM
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.families import dflash, qwen3_5
from dflash_jax.options.train import TrainConfig
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training import run
from dflash_jax.training.corpus import conversations, standard_library, windows
from dflash_jax.training.evaluation import (
    acceptance,
    held_out_prompts,
    is_degenerate,
    measure,
    with_greedy_drafts,
)
from dflash_jax.training.language import make_step, next_token_loss, token_losses
from dflash_jax.training.losses import Loss, default_gamma
from dflash_jax.training.optimiser import optimiser
from dflash_jax.training.step import Batch, Recipe, Trainer
from dflash_jax.training.tokenizer import SPECIAL, save_tokenizer, train_tokenizer
from tools.bundled_pair import with_positions

VOCABULARY = 512
MAX_POSITIONS = 8192
TARGET = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
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
    "num_target_layers": 4,
    "block_size": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 128,
    "use_sliding_window": True,
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": SPECIAL.index("<|mask|>"), "target_layer_ids": [0, 1, 2, 3]},
}
# Tokens of a regenerated sequence, prompt included, and the temperatures they are drawn at.
SEQUENCE = 256
TEMPERATURES = [0.0, 0.3, 0.6, 0.9]
# Of the text for the second pass of the drafter: warmer than greedy, which repeats itself.
POLISH_TEMPERATURES = [0.2, 0.4, 0.6, 0.8]
ANCHORS = 32
SELECTOR_RANK = 64
# Tokens of a row that the MTP head is trained on.
HEAD_ROW = 512
# Of the pair for long contexts: its positions, tokens of the rows of both legs of its training, and anchors of a row of
# the drafter's.
LONG_POSITIONS, LONG_ROWS, LONG_ANCHORS = 33 * 1024, (8192, 32768), 512
# Positions at which the ranges of the held-out loss begin and end, and the length of the short rows beside it.
LONG_BUCKETS, SHORT_ROW = (0, 1024, 8192, 32768), 1024


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
    stream = joined([texts[i] for i in order], tokenizer)
    np.save(kept, stream)
    return stream


def joined(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Token ids of texts, each ended by <|endoftext|>."""
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([*p.ids, end], np.int32) for p in pieces])


def long_stream(documents, directory: Path) -> np.ndarray:
    """Documents in the order of their paths: what a file uses is often defined in one that is near."""
    return joined([d.text for d in documents], Tokenizer.from_file(str(directory / "tokenizer.json")))


def bits_per_byte(model, documents, directory: Path, length: int = 512) -> float:
    """Held-out cross-entropy in windows of ``length`` tokens, the first token of each given; per byte of the text
    predicted.
    """
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


def train(name: str, batches, step, model, state, save, every: int = 500, report: int = 50):
    """Runs batches through ``step(model, state, batch) → (model, state, loss)``, reporting and saving on the way."""
    began, losses = time.time(), []
    for i, batch in enumerate(batches, 1):
        model, state, loss = step(model, state, batch)
        losses.append(float(loss))
        if i % report == 0:
            seconds = (time.time() - began) / i
            print(f"{name} step {i} loss {np.mean(losses[-report:]):.4f} {seconds:.2f} s/step", flush=True)
        if i % every == 0:
            save(model)
    save(model)


def stage_target(args) -> None:
    directory = args.out / "target"
    train_documents, held_out = standard_library()
    stream = token_stream(train_documents, args)
    print(f"{len(stream)} training tokens on {jax.devices()}", flush=True)
    config = qwen3_5.read_config(TARGET)
    model = Decoder(config, rngs=nnx.Rngs(args.seed))
    transformation = optimiser(5e-3, args.target_steps, "muon")

    def save(model):
        save_module(model, qwen3_5.weight_names(config), TARGET, directory)
        print(f"held-out bits per byte {bits_per_byte(load_target(directory), held_out, directory):.4f}", flush=True)

    # optax has no type for a tree that is a module.
    state = transformation.init(model)  # pyright: ignore[reportArgumentType]
    batches = map(jnp.asarray, windows(stream, 512, 8, args.target_steps, args.seed))
    train("target", batches, make_step(next_token_loss, transformation), model, state, save)


def stage_regenerate(args) -> None:
    """The target's own continuations of training text: what the drafter must learn to foresee."""
    regenerate(args, "regenerated.npz", TEMPERATURES, args.seed)


def regenerate(args, name: str, temperatures: list[float], seed: int) -> None:
    llm, rng = LLM(args.out / "target"), np.random.default_rng(seed)
    stream = token_stream(standard_library()[0], args)
    tokens, mask, began = [], [], time.time()
    for done in range(0, args.sequences, 32):
        cuts = rng.integers(0, len(stream) - SEQUENCE, 32)
        prompts = [stream[c : c + rng.integers(16, 96)].tolist() for c in cuts]
        params = [
            SamplingParams(
                temperature=temperatures[i % 4],
                max_tokens=SEQUENCE - len(p),
                seed=seed * args.sequences + done + i,
                ignore_eos=True,
            )
            for i, p in enumerate(prompts)
        ]
        for completion in llm.generate(prompts, params):
            tokens.append(completion.prompt_ids + completion.token_ids)
            mask.append([False] * len(completion.prompt_ids) + [True] * len(completion.token_ids))
        print(f"{len(tokens)} sequences, {len(tokens) * SEQUENCE / (time.time() - began):.0f} tok/s", flush=True)
        np.savez_compressed(args.work / name, tokens=np.array(tokens, np.int32), mask=np.array(mask))


def draft_batches(args, data, steps: int, own: int, rows: int = 8):
    """Yields (block width, batch, key): ``own`` rows of the target's text ``data``, the rest what people
    wrote.

    Every fourth batch has blocks of 16 slots, the others of 8: most drafts end before the eighth token, and the narrow
    blocks are half the work.
    """
    written = windows(token_stream(standard_library()[0], args), SEQUENCE - 1, rows - own, steps, args.seed)
    rng, order = np.random.default_rng(args.seed), np.zeros((0,), int)
    for i, people in enumerate(written):
        if len(order) < rows:
            order = rng.permutation(len(data["tokens"]))
        mine, order = order[:own], order[own:]
        tokens = np.concatenate([data["tokens"][mine], people])
        mask = np.concatenate([data["mask"][mine], np.ones(people.shape, bool)])
        key = jax.random.fold_in(jax.random.key(args.seed), i)
        tokens, mask = jnp.asarray(tokens[None]), jnp.asarray(mask[None])
        yield 16 if i % 4 == 0 else 8, Batch(tokens, mask, jnp.zeros(tokens.shape, jnp.int32)), key


def stage_drafter(args) -> None:
    data = dict(np.load(args.work / "regenerated.npz"))
    model = Drafter(dflash.read_config(DRAFT), rngs=nnx.Rngs(args.seed))
    train_drafter(args, model, data, args.draft_steps, 4e-3, own=4)


def stage_polish(args) -> None:
    """A second pass at a lower rate, mostly over fresh text of the target's own that does not repeat itself."""
    regenerate(args, "polish.npz", POLISH_TEMPERATURES, args.seed + 1)
    data = [np.load(args.work / name) for name in ("regenerated.npz", "polish.npz")]
    tokens, mask = (np.concatenate([d[k] for d in data]) for k in ("tokens", "mask"))
    lively = [not is_degenerate(t[m]) for t, m in zip(tokens, mask, strict=True)]
    print(f"{sum(lively)} of {len(lively)} sequences do not repeat themselves", flush=True)
    model = load_drafter(args.out / "draft")
    train_drafter(args, model, {"tokens": tokens[lively], "mask": mask[lively]}, args.polish_steps, 1.5e-3, own=6)


def train_drafter(args, model, data: dict, count: int, rate: float, own: int) -> None:
    target, config = load_target(args.out / "target"), model.config
    transformation = optimiser(rate, count, "muon")

    def trainer(slots: int) -> Trainer:
        return Trainer(target, config, Recipe(Loss("kl", gamma=default_gamma(slots)), ANCHORS, slots), transformation)

    trainers = {slots: trainer(slots) for slots in (8, 16)}

    def step(model, state, batch):
        slots, rows, key = batch
        (model, state), sums, _ = trainers[slots].step((model, state), trainers[slots].leaves, rows, key)
        return model, state, sums.loss / sums.weight

    drafter, state = trainers[8].start(model)
    save = partial(save_module, entries=dflash.weight_names(config), raw=DRAFT, directory=args.out / "draft")
    train("drafter", draft_batches(args, data, count, own), step, drafter, state, save)


def stage_selector(args) -> None:
    """The drafter's selector by `train fit --selector`, the rest as it is, over a third of the text that repeats itself
    and all other text.
    """
    regenerate(args, "selector.npz", TEMPERATURES, args.seed + 7)
    data, path = np.load(args.work / "selector.npz"), args.work / "selector.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i, (tokens, mask) in enumerate(zip(data["tokens"], data["mask"], strict=True)):
            if i % 3 == 0 or not is_degenerate(tokens[mask]):
                line = {"prompt_ids": tokens[~mask].tolist(), "response_ids": tokens[mask].tolist()}
                file.write(json.dumps(line) + "\n")
    config = TrainConfig(
        target=str(args.out / "target"),
        draft=str(args.out / "draft"),
        selector=True,
        rank=SELECTOR_RANK,
        body_rate=0.0,
        data=(str(path),),
        output=str(args.work / "selector"),
        sequence_length=2048,
        rows=1,
        anchors=512,
        steps=args.selector_steps,
        loss="kl",
        gamma=default_gamma(8),
        learning_rate=1e-2,
        seed=args.seed,
    )
    step, last = run.fit(config, partial(print, flush=True))
    if step < last:
        raise SystemExit(75)
    shutil.copytree(config.directory / "draft", args.out / "draft", dirs_exist_ok=True)


def stage_head(args) -> None:
    """The target's MTP head by `train fit --mtp`, against the target's distributions on what people wrote.

    It joins the target's checkpoint.
    """
    path, rows = args.work / "head.jsonl", 4
    stream = token_stream(standard_library()[0], args)
    with path.open("w", encoding="utf-8") as file:
        for tokens in next(windows(stream, HEAD_ROW - 1, rows * args.head_steps, 1, args.seed)):
            file.write(json.dumps({"response_ids": tokens.tolist()}) + "\n")
    config = TrainConfig(
        target=str(args.out / "target"),
        mtp=True,
        data=(str(path),),
        output=str(args.work / "head"),
        sequence_length=HEAD_ROW,
        rows=rows,
        anchors=HEAD_ROW - 1,
        steps=args.head_steps,
        loss="kl",
        optimizer="muon",
        learning_rate=4e-3,
        seed=args.seed,
        save_every=50,
    )
    step, last = run.fit(config, partial(print, flush=True))
    if step < last:
        raise SystemExit(75)
    join_head(args.out / "target", config.directory / "draft")


def join_head(target: Path, head: Path) -> None:
    """Adds the tensors of an MTP head to the checkpoint of its target, in place of an earlier head's."""
    checkpoint, trained = TensorFiles(target), TensorFiles(head)
    tensors = {n: np.array(checkpoint.read(n)) for n in checkpoint if not n.startswith("mtp.")}
    tensors |= {n: np.array(trained.read(n)) for n in trained if n.startswith("mtp.")}
    write_tensors(target, tensors)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    write_json(target / "config.json", raw | {"mtp_num_hidden_layers": 1})


def stage_record(args) -> None:
    """Writes the greedy acceptance of drafter and head, each in blocks of its own size, into their configs."""
    for draft, directory in ((args.out / "draft", args.out / "draft"), ("mtp", args.out / "target")):
        llm = LLM(args.out / "target", draft)
        prompts = held_out_prompts([llm.encode(d.text) for d in standard_library()[1]], 96, 128, args.seed + 1)
        params = SamplingParams(temperature=0.0, max_tokens=128)
        measured = acceptance(llm.generate(prompts, params, llm.largest_block), keep_all=True)
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        raw |= {"acceptance_length": round(measured.mean, 2), "acceptance_rates": [round(r, 4) for r in measured.rates]}
        write_json(directory / "config.json", raw)
        print(f"{directory}: {measured}", flush=True)


def stage_evaluate(args) -> None:
    directory = args.out / "target"
    _, held_out = standard_library()
    llm = LLM(directory, args.out / "draft")
    streams = [llm.encode(d.text) for d in held_out]
    print(f"held-out bits per byte {bits_per_byte(llm.target, held_out, directory):.4f}", flush=True)
    prompts = held_out_prompts(streams, 96, 64, args.seed)
    # Greedy text repeats itself nine times out of ten, and what does is left out.
    many = held_out_prompts(streams, 96, 512, args.seed + 1)
    print(f"greedy {measure(llm, many, SamplingParams(temperature=0.0, max_tokens=128), 16)}", flush=True)
    for temperature in (0.0, 0.7, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=128, seed=args.seed)
        for block in (16, 8, 4):
            print(f"temperature {temperature} block {block} {measure(llm, prompts, params, block)}", flush=True)
    llm = with_greedy_drafts(llm)
    for temperature in (0.7, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=128, seed=args.seed)
        print(f"temperature {temperature} block 16, greedy drafts {measure(llm, prompts, params, 16)}", flush=True)


def stage_compare(args) -> None:
    """Acceptance lengths of drafter and head on the same held-out prompts in blocks of 4, as JSON."""
    directory, rows = args.out / "target", []
    llms = {"dflash": LLM(directory, args.out / "draft"), "mtp": LLM(directory, "mtp")}
    streams = [llms["mtp"].encode(d.text) for d in standard_library()[1]]
    prompts = held_out_prompts(streams, 96, 48, args.seed + 1)
    for temperature in (0.0, 0.7):
        texts = []
        params = SamplingParams(temperature=temperature, max_tokens=128, seed=args.seed)
        for name, llm in llms.items():
            completions = llm.generate(prompts, params, 4)
            texts.append([c.token_ids for c in completions])
            row = {"drafter": name, "temperature": temperature, "block_size": 4, "prompts": len(prompts)}
            each = {"not_repeating": acceptance(completions), "all": acceptance(completions, keep_all=True)}
            rows.append(row | {kind: {k: vars(a)[k] for k in ("mean", "rounds", "kept")} for kind, a in each.items()})
            print(rows[-1], flush=True)
        assert texts[0] == texts[1], "the text depends on the drafter"
    path = args.work / "acceptance.json"
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}", flush=True)


def stage_long_target(args) -> None:
    """The target on rows of one long text each, at a fifth of the rate that it began with."""
    directory, _ = with_positions(args.work / "long", LONG_POSITIONS, args.out)
    stream = long_stream(standard_library()[0], directory)
    model, raw = load_target(directory), TARGET | {"max_position_embeddings": LONG_POSITIONS}
    transformation = optimiser(1e-3, sum(args.long_steps), "muon")
    sizes = zip(LONG_ROWS, args.long_steps, strict=True)
    legs = [windows(stream, length, 1, steps, args.seed) for length, steps in sizes]

    def save(model):
        save_module(model, qwen3_5.weight_names(model.config), raw, directory)

    state = transformation.init(model)  # pyright: ignore[reportArgumentType]
    batches, step = map(jnp.asarray, chain(*legs)), make_step(next_token_loss, transformation)
    train("target", batches, step, model, state, save, every=10, report=1)


def stage_long_drafter(args) -> None:
    """The drafter by `train fit` on rows of one long text each, against the distributions of the long target."""
    target = args.work / "long" / "target"
    _, draft = with_positions(args.work / "long-start", LONG_POSITIONS, args.out)
    stream = long_stream(standard_library()[0], target)
    for length, steps in zip(LONG_ROWS, args.long_draft_steps, strict=True):
        path = args.work / f"long-{length}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for (tokens,) in windows(stream, length - 1, 1, steps, args.seed):
                file.write(json.dumps({"response_ids": tokens.tolist()}) + "\n")
        config = TrainConfig(
            target=str(target),
            draft=str(draft),
            data=(str(path),),
            output=str(args.work / f"long-drafter-{length}"),
            sequence_length=length,
            rows=1,
            anchors=LONG_ANCHORS,
            steps=steps,
            loss="kl",
            optimizer="muon",
            learning_rate=1.5e-3,
            seed=args.seed,
            log_every=1,
            save_every=10,
        )
        step, last = run.fit(config, partial(print, flush=True))
        if step < last:
            raise SystemExit(75)
        draft = config.directory / "draft"
    shutil.copytree(draft, args.work / "long" / "draft", dirs_exist_ok=True)


def losses_by_position(model: Decoder, rows: np.ndarray) -> list[dict]:
    """Held-out loss, in nats a token, by position in the rows [N, T + 1].

    The loss of half of the tokens is also given after at most `SHORT_ROW` tokens of context and at least half as many:
    what the loss is if the model has no more.
    """
    losses = jax.jit(token_losses)
    long = np.stack([np.asarray(losses(model, row[None])[0]) for row in rows])
    pieces = [row[i : i + SHORT_ROW + 1] for row in rows for i in range(0, rows.shape[1] - 1, SHORT_ROW)]
    short = np.stack([np.asarray(losses(model, piece[None])[0]) for piece in pieces]).reshape(long.shape)
    is_late = np.arange(long.shape[1]) % SHORT_ROW >= SHORT_ROW // 2
    found = []
    for first, end in pairwise(LONG_BUCKETS):
        place = (np.arange(long.shape[1]) >= first) & (np.arange(long.shape[1]) < end)
        figures = {"all": long[:, place], "late": long[:, place & is_late], "late_short": short[:, place & is_late]}
        found.append({"first": first, "end": end, **{k: round(float(v.mean()), 4) for k, v in figures.items()}})
    return found


def stage_long_evaluate(args) -> None:
    """Held-out loss by position before and after, as JSON."""
    found = {}
    for name, directory in (("bundled", args.out / "target"), ("long", args.work / "long" / "target")):
        stream, size = long_stream(standard_library()[1], directory), LONG_ROWS[-1]
        starts = np.linspace(0, len(stream) - size - 1, args.long_held_out).astype(int)
        rows = np.stack([stream[start : start + size + 1] for start in starts])
        found[name] = losses_by_position(load_target(directory), rows)
        print(f"{name}, {len(rows)} rows: {json.dumps(found[name])}", flush=True)
    path = args.work / "long-losses.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


STAGES = {
    "tokenizer": stage_tokenizer,
    "target": stage_target,
    "regenerate": stage_regenerate,
    "drafter": stage_drafter,
    "polish": stage_polish,
    "selector": stage_selector,
    "head": stage_head,
    "record": stage_record,
    "evaluate": stage_evaluate,
    "compare": stage_compare,
    "long-target": stage_long_target,
    "long-drafter": stage_long_drafter,
    "long-evaluate": stage_long_evaluate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "dflash_jax" / "assets" / "tiny")
    parser.add_argument(
        "--work", type=Path, default=Path("tiny_pair_work"), help="for the token stream and regenerated text"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-steps", type=int, default=1100)
    parser.add_argument("--sequences", type=int, default=2048, help="to regenerate")
    parser.add_argument("--draft-steps", type=int, default=3000)
    parser.add_argument("--polish-steps", type=int, default=1500)
    parser.add_argument("--selector-steps", type=int, default=1500)
    parser.add_argument("--head-steps", type=int, default=250)
    legs = "on rows of 8,192 and of 32,768 tokens"
    parser.add_argument("--long-steps", type=int, nargs=2, default=[16, 2], metavar="N", help=legs)
    parser.add_argument("--long-draft-steps", type=int, nargs=2, default=[16, 2], metavar="N", help=legs)
    text = "rows of 32,768 held-out tokens"
    parser.add_argument("--long-held-out", type=int, default=3, metavar="N", help=text)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        STAGES[stage](args)


if __name__ == "__main__":
    main()
