"""Answers by the very target that the drafter is for: prompts in, token ids with their conversations out."""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from tqdm import tqdm

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.parallel import distributed
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training.config import TrainConfig
from dflash_jax.training.data import Skipped, fault, messages_of, read_lines, text_of

# Conversations whose answers are written together: at least so many, and for each slot.
GROUP, TURNS = 256, 8


def asks(config: TrainConfig, skipped: Skipped | None) -> Iterator[tuple[str, list[dict] | str]]:
    """("file:line", what it asks: a conversation's turns without the answers, or a text to go on with)."""
    for where, record in read_lines(config.data, skipped):
        try:
            if "messages" in record:
                found = [m for m in messages_of(record, where) if m["role"] != "assistant"]
                if not any(m["role"] == "user" for m in found):
                    raise InputError(f"{where}: the conversation has no user turn")
            elif isinstance(found := record.get("prompt", record.get("text")), str) and found:
                text_of(found, where)
            else:
                raise InputError(f"{where}: a line must have messages, prompt or text")
        except InputError as e:
            fault(str(e), skipped)
            continue
        yield where, found


class Progress:
    """Lines answered so far, beside what they were answered with: another call with the same goes on from there."""

    def __init__(self, config: TrainConfig, wanted: list, path: Path):
        self.path, self.record = path, path.with_name(f"{path.stem}.json")
        names = ("target", "dtype", "temperature", "max_new_tokens", "thinking", "seed")
        asked = blake2b(json.dumps([ask for _, ask in wanted]).encode(), digest_size=16).hexdigest()
        self.settings = {name: getattr(config, name) for name in names} | {"data": asked}
        held = json.loads(self.record.read_text()) if self.record.exists() else None
        if held is None and path.exists() and path.stat().st_size:
            raise InputError(f"{path} has no {self.record.name} beside it: give another --output, or remove it")
        counts = ("done", "unanswered", "bytes")
        self.done, self.unanswered, self.bytes = (held[name] for name in counts) if held else (0, 0, 0)
        before = held["settings"] if held else self.settings
        wrong = [f"{k} was {before.get(k)!r}, is {v!r}" for k, v in self.settings.items() if before.get(k) != v]
        if (path.stat().st_size if path.exists() else 0) < self.bytes:
            raise InputError(
                f"{path} has less than the {self.bytes} bytes that {self.record.name} tells of: remove both"
            )
        if wrong:
            raise InputError(f"{path} has answers with other settings: {'; '.join(wrong)}")

    def add(self, lines: list[dict], asked: int) -> None:
        """The lines of ``asked`` more prompts; what an earlier call wrote and did not count is written over."""
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self.bytes)
            file.seek(self.bytes)
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self.bytes = file.tell()
        self.done += asked
        self.unanswered += asked - len({line["source"] for line in lines})
        fresh = self.record.with_suffix(".new")
        counts = {"done": self.done, "unanswered": self.unanswered, "bytes": self.bytes}
        fresh.write_text(json.dumps({"settings": self.settings, **counts}) + "\n")
        fresh.replace(self.record)


def regenerate(config: TrainConfig, llm: LLM, path: Path, tell: Callable[[str], None]) -> int:
    """Writes into ``path`` a line for each answer: prompt_ids, response_ids, source (which line asked) and, of
    conversations, messages. Goes on where an earlier call with the same settings stopped. Of several processes the
    first one writes. Returns how many lines have answers."""
    skipped = Skipped() if config.skip_bad_lines else None
    wanted = list(asks(config, skipped))
    path.parent.mkdir(parents=True, exist_ok=True)
    progress, size = Progress(config, wanted, path), max(GROUP, TURNS * config.slots)
    # All have read before one writes.
    done, mine = distributed.agreed(progress.done), distributed.is_first()
    if done:
        tell(f"{done} of {len(wanted)} were answered before")
    with tqdm(total=len(wanted), initial=done, unit="prompt", disable=not mine) as bar:
        for start in range(done, len(wanted), size):
            group = wanted[start : start + size]
            lines = _answered(config, llm, group, start, skipped)
            if mine:
                progress.add(lines, len(group))
            bar.update(len(group))
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    unanswered = distributed.agreed(progress.unanswered)
    if unanswered:
        tell(f"{unanswered} prompts have no answer: left out, or without room in the target's {llm.max_len} positions")
    return len(wanted) - unanswered


def _answered(config: TrainConfig, llm: LLM, group: list, start: int, skipped: Skipped | None) -> list[dict]:
    """The lines of a group, in the order in which it asked. A prompt that leaves no room is not answered."""
    lines: list[list[dict]] = [[] for _ in group]
    talks: list[list[dict]] = [[] for _ in group]
    left = {i: ([*ask] if isinstance(ask, list) else ask) for i, (_, ask) in enumerate(group)}
    while left:
        fitting = []
        for i, ask in left.items():
            if not isinstance(ask, str):
                while ask:
                    talks[i].append(ask.pop(0))
                    if talks[i][-1]["role"] == "user":
                        break
            try:
                prompt = llm.encode(ask) if isinstance(ask, str) else llm.encode_chat(talks[i], config.thinking)
            except InputError as e:
                fault(f"{group[i][0]}: {e}", skipped)
                continue
            if len(prompt) < llm.max_len:
                fitting.append((i, prompt))
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
