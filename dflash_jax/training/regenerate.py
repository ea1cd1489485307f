"""Answers by the very target that the drafter is for: prompts in, token ids with their conversations out."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from dflash_jax.errors import InputError
from dflash_jax.llm import LLM
from dflash_jax.params import SamplingParams
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data import Skipped, fault, messages_of, read_lines

# Conversations whose answers are written together: at least so many, and for each slot.
GROUP, TURNS = 256, 8


def asks(config: TrainConfig, skipped: Skipped | None) -> Iterator[list[dict] | str]:
    """What each line asks: a conversation's turns without the answers, or a text to go on with."""
    for where, record in read_lines(config.data, skipped):
        try:
            if "messages" in record:
                found = [m for m in messages_of(record, where) if m["role"] != "assistant"]
                if not any(m["role"] == "user" for m in found):
                    raise InputError(f"{where}: the conversation has no user turn")
            elif isinstance(found := record.get("prompt", record.get("text")), str) and found:
                pass
            else:
                raise InputError(f"{where}: a line must have messages, prompt or text")
        except InputError as e:
            fault(str(e), skipped)
            continue
        yield found


def _done(path: Path) -> int:
    """How many lines asked are answered; a line that was cut off is removed."""
    if not path.exists():
        return 0
    whole, last = 0, -1
    with path.open("rb+") as file:
        for line in file:
            try:
                last = json.loads(line)["source"]
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        file.truncate(whole)
    return last + 1


def regenerate(config: TrainConfig, llm: LLM, path: Path, tell: Callable[[str], None]) -> int:
    """Appends to ``path`` a line for each answer: prompt_ids, response_ids, source (which line asked) and, of
    conversations, messages. Goes on where an earlier call stopped. Returns how many lines were asked."""
    skipped = Skipped() if config.skip_bad_lines else None
    wanted = list(asks(config, skipped))
    path.parent.mkdir(parents=True, exist_ok=True)
    done, size = _done(path), max(GROUP, TURNS * config.slots)
    if done:
        tell(f"{done} of {len(wanted)} were answered before")
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(wanted), initial=done, unit="prompt") as bar:
        for start in range(done, len(wanted), size):
            group = wanted[start : start + size]
            for line in _answered(config, llm, group, start):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(group))
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    return len(wanted)


def _answered(config: TrainConfig, llm: LLM, group: list, start: int) -> list[dict]:
    """The lines of a group, in the order in which it asked. A prompt that leaves no room is not answered."""
    lines: list[list[dict]] = [[] for _ in group]
    talks: list[list[dict]] = [[] for _ in group]
    left = {i: ([*ask] if isinstance(ask, list) else ask) for i, ask in enumerate(group)}
    while left:
        prompts, which = [], list(left)
        for i in which:
            if isinstance(left[i], str):
                prompts.append(llm.encode(left[i]))
                continue
            while left[i]:
                talks[i].append(left[i].pop(0))
                if talks[i][-1]["role"] == "user":
                    break
            prompts.append(llm.encode_chat(talks[i], config.thinking))
        fitting = [(i, p) for i, p in zip(which, prompts, strict=True) if len(p) < llm.max_len]
        which, prompts = [i for i, _ in fitting], [p for _, p in fitting]
        params = [
            SamplingParams(
                temperature=config.temperature,
                max_tokens=min(config.max_new_tokens, llm.max_len - len(p)),
                seed=(config.seed + start + i) % 2**32,
            )
            for i, p in zip(which, prompts, strict=True)
        ]
        answers = llm.generate(prompts, params, progress=False)
        rest = {}
        for i, prompt, answer in zip(which, prompts, answers, strict=True):
            line = {"source": start + i, "prompt_ids": prompt, "response_ids": answer.token_ids}
            if not isinstance(left[i], str):
                talks[i].append({"role": "assistant", "content": _content(answer.text)})
                line["messages"] = list(talks[i])
                if any(m["role"] == "user" for m in left[i]):
                    rest[i] = left[i]
            lines[i].append(line)
        left = rest
    return [line for each in lines for line in each]


def _content(text: str) -> str:
    """Without the thought, which templates leave out of earlier turns."""
    return text.rpartition("</think>")[2].lstrip("\n")
