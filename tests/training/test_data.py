"""Lines → tokens with marks → packed rows in an order that a step number gives."""

import json

import numpy as np
import pytest

from dflash_jax import LLM, InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training.data import (
    Document,
    PackedRows,
    batches,
    check_learnable,
    frequent_tokens,
    pack,
    read_documents,
)
from dflash_jax.training.tokenising import Skipped
from tests.training.talks import TALKS

MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LAST_ONLY = "{% for m in messages[-1:] %}{{ m.role }}: {{ m.content }}{% endfor %}"


def test_loss_mask_covers_the_assistant_answers_only(tmp_path):
    """What is learned, written out again, is what the assistant said."""
    llm, data = LLM(None, None), tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": t}) + "\n" for t in TALKS))
    for document, talk in zip(read_documents([data], llm.tokenizer, 512), TALKS, strict=True):
        said = llm.tokenizer.decode(document.tokens[document.mask].tolist())
        assert said.strip().endswith(talk[1]["content"].strip())
        asked = llm.tokenizer.decode(document.tokens[~document.mask].tolist())
        assert talk[0]["content"] in asked
        assert talk[1]["content"] not in asked


@pytest.mark.parametrize("template", [None, MARKED])
def test_answers_of_several_turns_are_marked(template):
    tokenizer = Tokenizer(TINY / "target")
    if template:
        tokenizer._full.chat_template = template
    talk = [{"role": r, "content": c} for r, c in zip(["user", "assistant", "user", "assistant"], "abcd", strict=True)]
    tokens, mask = tokenizer.mark_answers(talk, "here")
    learned = tokenizer.encode_plain("b<|im_end|>\n") + tokenizer.encode_plain("d<|im_end|>\n")
    assert [t for t, m in zip(tokens, mask, strict=True) if m] == learned


def test_a_template_that_rewrites_earlier_turns_is_told():
    tokenizer = Tokenizer(TINY / "target")
    tokenizer._full.chat_template = LAST_ONLY
    with pytest.raises(InputError, match=r"file:3: .*no generation marker.*messages\[1\].*regenerate"):
        tokenizer.mark_answers(TALKS[0], "file:3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl:2: not JSON"),
        ("[]", "bad.jsonl:2: a line must be an object"),
        ('{"x": 1}', "bad.jsonl:2: a line must have messages, conversations, text"),
        ('{"messages": [{"role": "user"}]}', r"bad.jsonl:2: messages\[0\] must have a role and a content"),
        ('{"text": ""}', "bad.jsonl:2: the document has 0 tokens"),
        ('{"response_ids": [1, 2, 5000]}', "bad.jsonl:2: token id 5000: ids are 0 to 511"),
        ('{"response_ids": [true]}', "bad.jsonl:2: response_ids must be a list of token ids"),
        ('{"response_ids": [1, 99999999999]}', "bad.jsonl:2: response_ids must be a list of token ids"),
        ('{"text": "ab\\ud800"}', "bad.jsonl:2: .* at character 2 is no text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "bad.jsonl:2: the conversation has no assistant turn"),
        (b'{"text": "\xff"}', "bad.jsonl:2: not UTF-8: .* at byte 10 of the line"),
    ],
)
def test_a_broken_line_is_named_or_counted(line, message, tmp_path, capsys):
    path, good = tmp_path / "bad.jsonl", json.dumps({"text": "def f(x):\n    return x\n"})
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"%b\n%b\n\n%b\n" % (good.encode(), line, good.encode()))
    llm = LLM(None, None)
    with pytest.raises(InputError, match=message):
        read_documents([path], llm.tokenizer, 512)
    skipped = Skipped()
    assert len(read_documents([path], llm.tokenizer, 512, skipped)) == 2
    assert skipped.count == 1


def test_nothing_to_learn_within_a_row_is_told(tmp_path):
    """An answer behind the end of a row; and what is cut off of others."""
    long = Document(np.arange(200), np.arange(200) >= 100)
    with pytest.raises(InputError, match="within the 64 of a row"):
        check_learnable([long], 64, ["x"])
    check_learnable([long], 128, ["x"])
    assert PackedRows([long, Document(np.arange(9), np.ones(9, bool))], 128).cut_off == (1, 72)


def test_rows_are_packed_and_padded():
    lengths = [5, 9, 3, 7, 2, 2, 12]
    rows = pack(lengths, 10)
    assert sorted(i for row in rows for i in row) == list(range(7))
    assert all(sum(min(lengths[i], 10) for i in row) <= 10 for row in rows)
    assert len(rows) == 4
    docs = [_document(n, i) for i, n in enumerate(lengths)]
    packed = PackedRows(docs, 10)
    for i, members in enumerate(packed.rows):
        row = packed[i]
        for document, start in zip(members, sorted({int(s) for s in row["starts"]}), strict=False):
            inside = row["starts"] == start
            assert set(row["tokens"][inside]) == {document + 1}
        assert row["loss_mask"].sum() == sum(min(lengths[d], 10) for d in members)


def _document(n: int, i: int):
    return Document(np.full(n, i + 1, np.int32), np.ones(n, bool))


def test_the_order_of_rows_follows_from_the_step():
    rows = PackedRows([_document(4, i) for i in range(11)], 4)

    def take(first: int, count: int):
        found = batches(rows, 4, 2, 7, first)
        return [next(found)["tokens"][..., 0] for _ in range(count)]

    whole = take(0, 12)
    for a, b in zip(take(5, 7), whole[5:], strict=True):
        np.testing.assert_array_equal(a, b)
    seen = np.concatenate([x.ravel() for x in whole])[:44].reshape(4, 11)
    assert all(set(epoch) == set(range(1, 12)) for epoch in seen)
    assert not np.array_equal(seen[0], seen[1])
    alone = batches(rows, 1, 1, 7, 3)
    np.testing.assert_array_equal(next(alone)["tokens"][0, 0, 0], whole[0][1, 1])


def test_the_frequent_tokens_are_of_what_is_learned():
    tokens, mask = np.array([9, 9, 9, 4, 4, 7, 2, 2, 2]), np.array([0, 0, 0, 1, 1, 1, 1, 1, 1], bool)
    rows = PackedRows([Document(tokens, mask)], 16)
    assert frequent_tokens(rows, 2).tolist() == [2, 4]
    assert frequent_tokens(rows, 99).tolist() == [2, 4, 7]
