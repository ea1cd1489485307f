"""What counting alone reaches: interpolated modified Kneser-Ney n-grams over tokens and over bytes, in bits per byte.

    python scripts/bundled/ngram_baseline.py

Same split of the standard library, same tokenizer and same held-out measure as `bits_per_byte` in make_tiny_pair.py:
windows of 513 ids, the first of each given, the other 512 predicted, over the bytes of the text predicted. Only the
context differs, in the n-gram's favour: it runs on across windows (and held-out files) and is never reset. Training
reads each document once, ended by <|endoftext|>, without the chats that the target also sees: they repeat functions of
the same documents. The byte model reads the documents as UTF-8, with an end-of-document symbol as its 257th.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dflash_jax.training.corpus import standard_library

TOKENIZER = Path(__file__).parents[2] / "dflash_jax" / "assets" / "tiny" / "target" / "tokenizer.json"
Size = Callable[[list[int]], int]


def keys(ids: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """Every n-gram of a stream as one int64 in base ``vocabulary``, the oldest id in the highest place."""
    if vocabulary**order > 2**63:
        raise ValueError(f"{order}-grams over {vocabulary} ids do not fit in 63 bits")
    out = np.zeros(max(len(ids) - order + 1, 0), np.int64)
    for i in range(order):
        out = out * vocabulary + ids[i : i + len(out)].astype(np.int64)
    return out


def discounts(counts: np.ndarray) -> np.ndarray:
    """Chen and Goodman's D1, D2, D3+ at index 1, 2, 3; 0.75 for all where the counts of counts do not yield them."""
    n1, n2, n3, n4 = (np.bincount(np.minimum(counts, 5), minlength=6)[1:5]).astype(float)
    if min(n1, n2, n3) > 0:
        y = n1 / (n1 + 2 * n2)
        d = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        if d[1:].min() > 0:
            return d
    return np.array([0, 0.75, 0.75, 0.75])


def look_up(table: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    at = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[at] == wanted, values[at], missing)


@dataclass(frozen=True)
class Level:
    """One order: p(w | context) = share[context w] + left[context] * p(w | context without its oldest id)."""

    grams: np.ndarray
    share: np.ndarray
    contexts: np.ndarray
    left: np.ndarray


@dataclass(frozen=True)
class KneserNey:
    vocabulary: int
    levels: list[Level]  # unigrams first

    @classmethod
    def fit(cls, ids: np.ndarray, order: int, vocabulary: int) -> "KneserNey":
        """Occurrences count at the top order, distinct left neighbours at every lower one."""
        levels = []
        grams, counts = np.unique(keys(ids, order, vocabulary), return_counts=True)
        for n in range(order, 0, -1):
            if n < order:
                grams, counts = np.unique(grams % vocabulary**n, return_counts=True)
            discount = discounts(counts)[np.minimum(counts, 3)]
            contexts, first, group = np.unique(grams // vocabulary, return_index=True, return_inverse=True)
            total = np.add.reduceat(counts, first)
            left = np.add.reduceat(discount, first) / total
            levels.append(Level(grams, (counts - discount) / total[group], contexts, left))
        return cls(vocabulary, levels[::-1])

    def probability(self, grams: np.ndarray) -> np.ndarray:
        """p(last id | the others) of full-order keys; a context never seen leaves all to the shorter one."""
        p = np.full(len(grams), 1 / self.vocabulary)
        for n, level in enumerate(self.levels, 1):
            key = grams % self.vocabulary**n
            left = look_up(level.contexts, level.left, key // self.vocabulary, 1.0)
            p = look_up(level.grams, level.share, key, 0.0) + left * p
        return p


def bits_per_byte(model: KneserNey, ids: np.ndarray, end: int, size: Size, length: int = 512) -> float:
    """``size`` says how many bytes a list of ids stands for; the stream's very first ids see ``end`` as their past."""
    order = len(model.levels)
    ids = ids[: len(ids) // (length + 1) * (length + 1)]
    grams = keys(np.concatenate([np.full(order - 1, end), ids]), order, model.vocabulary)
    bits = -np.log2(model.probability(grams)).reshape(-1, length + 1)[:, 1:].sum()
    return float(bits / sum(size(row[1:].tolist()) for row in ids.reshape(-1, length + 1)))


def measure(
    train: list[np.ndarray], held_out: list[np.ndarray], vocabulary: int, end: int, order: int, size: Size
) -> dict[str, float | int]:
    began = time.time()
    stream = np.concatenate([part for document in train for part in (document, [end])])
    model = KneserNey.fit(stream, order, vocabulary)
    figure = bits_per_byte(model, np.concatenate(held_out), end, size)
    return {
        "bits_per_byte": round(figure, 4),
        "order": order,
        "vocabulary": vocabulary,
        "training_ids": len(stream),
        "distinct_ngrams": sum(len(level.grams) for level in model.levels),
        "seconds": round(time.time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json (default: the tiny target's)"
    )
    parser.add_argument("--order", type=int, default=5, help="n of the token n-gram (default: 5)")
    parser.add_argument("--byte-order", type=int, default=5, help="n of the byte n-gram (default: 5)")
    args = parser.parse_args()
    splits = [[document.text for document in split] for split in standard_library()]
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    tokens = [[np.array(e.ids, np.int64) for e in tokenizer.encode_batch(texts)] for texts in splits]
    octets = [[np.frombuffer(text.encode(), np.uint8) for text in texts] for texts in splits]
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None, "the tokenizer has no <|endoftext|>"

    def size(ids: list[int]) -> int:
        return len(tokenizer.decode(ids, skip_special_tokens=False).encode())

    out = {
        "token": measure(tokens[0], tokens[1], tokenizer.get_vocab_size(), end, args.order, size),
        "byte": measure(octets[0], octets[1], 257, 256, args.byte_order, len),
    }
    print(json.dumps(out, indent=2))


if __name__ == "__main__":
    main()
