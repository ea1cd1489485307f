"""Tasks of a benchmark: JSON lines ``{"turns": ["the user's first message", …]}``, one file a task.

Lines of training prompts, ``{"messages": [{"role": "user", "content": "…"}]}``, are read too.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import InputError

# Names of the published tables.
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
    """Reads the conversations of a task.

    Args:
        path: The file.
        count: Conversations to draw; None: all, in order.
        seed: Of the draw.

    Returns:
        The user's turns of each conversation.

    Raises:
        InputError: The file is unreadable, empty, or has an invalid line.
    """
    talks = []
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
        talks.append(turns)
    if not talks:
        raise InputError(f"data {path} has no line")
    return talks if count is None or count >= len(talks) else random.Random(seed).sample(talks, count)


def read_tasks(paths: Sequence[Path], count: int | None, seed: int) -> dict[str, list[list[str]]]:
    """Reads several tasks; see `read_task`.

    Returns:
        Conversations by the task's name, which follows from the file's.
    """
    tasks = {}
    for path in paths:
        name = TITLES.get(path.stem.lower(), path.stem)
        if name in tasks:
            raise InputError(f"data {path}: another file is called {path.stem}, too")
        tasks[name] = read_task(path, count, seed)
    return tasks
