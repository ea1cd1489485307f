"""Tasks of a benchmark: JSON lines ``{"turns": ["what the user says first", …]}``, a file a task. Lines of training
prompts, ``{"messages": [{"role": "user", "content": "…"}]}``, are read too."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import InputError

# As the published tables call them.
TITLES = {
    "gsm8k": "GSM8K",
    "math500": "Math500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "mt-bench": "MT-Bench",
    "alpaca": "Alpaca",
    "livecodebench": "LiveCodeBench",
}


def _user_turn(message: dict) -> str:
    if message["role"] != "user":
        raise ValueError(message["role"])
    return message["content"]


def read_task(path: Path, count: int | None, seed: int) -> list[list[str]]:
    """Its conversations, the user's turns of each; ``count`` of them, drawn by ``seed``."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise InputError(f"data {path} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"data {path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = record["turns"] if "turns" in record else [_user_turn(m) for m in record["messages"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(
                f'{path}:{number}: a line must be an object {{"turns": ["…"]}}, or have messages of the user alone'
            ) from None
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise InputError(f"{path}:{number}: turns is {turns!r}: it must be a list of texts")
        found.append(turns)
    if not found:
        raise InputError(f"data {path} has no line")
    return found if count is None or count >= len(found) else random.Random(seed).sample(found, count)


def read_tasks(paths: Sequence[Path], count: int | None, seed: int) -> dict[str, list[list[str]]]:
    """Task → conversations; a task is called as its file."""
    tasks = {}
    for path in paths:
        name = TITLES.get(path.stem.lower(), path.stem)
        if name in tasks:
            raise InputError(f"data {path}: another file is called {path.stem}, too")
        tasks[name] = read_task(path, count, seed)
    return tasks
