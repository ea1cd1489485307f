"""Answers of the target to the training prompts: prompts in, token ids and conversations out."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.files import write_json, writing
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.media import by_kind
from dflash_jax.frontend.prompts import Prompt
from dflash_jax.media.parts import MediaPart
from dflash_jax.options.train import TrainConfig
from dflash_jax.progress import bar as progress_bar
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training.conversations import (
    DIRECTORY,
    at_line,
    conversation_of,
    digest_of_files,
    directory_of,
    split_conversation,
    text_of,
)
from dflash_jax.training.locks import locked
from dflash_jax.training.media import NO_TOWER
from dflash_jax.training.remote import RemoteTarget
from dflash_jax.training.tokenising import Skipped, fault, read_lines

# Conversations whose answers are written together: at least GROUP, and at least TURNS for each slot.
GROUP, TURNS = 256, 8
REMOTE_MEDIA = "images and videos are not sent to --urls: leave them out, or run without --urls"


@dataclass(frozen=True)
class PromptLine:
    """A line of the data.

    Attributes:
        where: "file:line".
        prompt: A conversation without the answers that the target gives itself, or a text to continue.
        directory: Where relative paths of its images and videos begin.
        parts: All of its images and videos.
        tools: Tools of the conversation.
    """

    where: str
    prompt: list[dict] | str
    directory: Path
    parts: Sequence[MediaPart] = ()
    tools: list[dict] | None = None

    @property
    def content(self) -> object:
        """What the answers depend on, beside the contents of files."""
        return {"messages": self.prompt, "tools": self.tools} if self.tools else self.prompt


def read_prompts(config: TrainConfig, skipped: Skipped | None, no_media: str | None) -> Iterator[PromptLine]:
    """Yields the prompts of ``config.data``; ``no_media``: why images and videos are not possible, or None."""
    for where, record in read_lines(config.data, skipped):
        parts, tools = list[MediaPart](), None
        try:
            directory = directory_of(record, where)
            if (conversation := conversation_of(record, where)) is not None:
                prompt, tools = _without_answers(conversation.messages), conversation.tools
                if not any(m["role"] == "user" for m in prompt):
                    raise InputError(f"{where}: the conversation has no user turn")
                _, parts = split_conversation(prompt, where, directory)
                if parts and no_media is not None:
                    raise InputError(f"{where}: {no_media}")
            elif isinstance(prompt := record.get("prompt", record.get("text")), str) and prompt:
                text_of(prompt, where)
            else:
                raise InputError(f"{where}: a line must have messages, conversations, prompt or text")
        except InputError as e:
            fault(str(e), skipped)
            continue
        yield PromptLine(where, prompt, directory, parts, tools)


def _without_answers(messages: Sequence[dict]) -> list[dict]:
    """Messages without the assistant's, but for those that a tool answers: results belong to the calls of the data."""
    following = [*messages[1:], {"role": None}]
    pairs = zip(messages, following, strict=True)
    return [m for m, after in pairs if m["role"] != "assistant" or after["role"] == "tool"]


def _is_answered(message: dict, following: Sequence[dict]) -> bool:
    """Whether the target answers after a message: of the user, or the last one of results of tools."""
    is_result = message["role"] == "tool" and not (following and following[0]["role"] == "tool")
    return message["role"] == "user" or is_result


class Progress:
    """The answers written so far, with the settings that they were written with.

    A second call with the same settings continues after the last counted answer.

    Attributes:
        path: The file of answers.
        record: The JSON file of settings and counts.
        settings: What the answers depend on.
        done: Prompts that were handled.
        unanswered: Prompts without an answer.
        bytes: Bytes of ``path`` that count.
    """

    def __init__(self, config: TrainConfig, prompts: Sequence[PromptLine], path: Path):
        """Opens ``path``, new or begun.

        Raises:
            InputError: The file is of other settings, or does not fit its record.
        """
        self.path, self.record = path, path.with_name(f"{path.stem}.json")
        names = ("target", "dtype", "temperature", "max_new_tokens", "thinking", "seed")
        digest = blake2b(json.dumps([line.content for line in prompts]).encode(), digest_size=16).hexdigest()
        self.settings = {name: getattr(config, name) for name in names} | {"data": digest}
        if parts := [part for line in prompts for part in line.parts]:
            self.settings["media"] = digest_of_files(parts)
        previous = read_json(self.record) if self.record.exists() else None
        names = ("settings", "done", "unanswered", "bytes")
        if previous is not None and not all(
            isinstance(previous.get(n), dict if n == "settings" else int) for n in names
        ):
            raise InputError(f"{self.record} is no record of answers: give another --output, or remove both")
        if previous is None and path.exists() and path.stat().st_size:
            raise InputError(f"{path} has no {self.record.name} beside it: give another --output, or remove it")
        counts = ("done", "unanswered", "bytes")
        self.done, self.unanswered, self.bytes = (previous[name] for name in counts) if previous else (0, 0, 0)
        settings = previous["settings"] if previous else self.settings
        changed = [f"{k} was {settings.get(k)!r}, is {v!r}" for k, v in self.settings.items() if settings.get(k) != v]
        if (path.stat().st_size if path.exists() else 0) < self.bytes:
            raise InputError(
                f"{path} has less than the {self.bytes} bytes that {self.record.name} tells of: remove both"
            )
        if changed:
            raise InputError(f"{path} has answers with other settings: {'; '.join(changed)}")

    def add(self, lines: list[dict], count: int) -> None:
        """Appends the lines of ``count`` more prompts, over bytes that an earlier call wrote and did not count."""
        with writing(self.path), self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(self.bytes)
            file.seek(self.bytes)
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self.bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        self.done += count
        self.unanswered += count - len({line["source"] for line in lines})
        counts = {"done": self.done, "unanswered": self.unanswered, "bytes": self.bytes}
        write_json(self.record, {"settings": self.settings, **counts})


def regenerate(config: TrainConfig, llm: LLM | RemoteTarget, path: Path, tell: Callable[[str], None]) -> int:
    """Writes a line for each answer into ``path``, and continues where an earlier call with the same settings stopped.

    A line has prompt_ids, response_ids, source (the number of its prompt) and, for conversations, messages and tools.
    After a call of the data that a tool answers, the conversation goes on with that call. Images and
    videos stay as the data names them: media_directory is where their paths begin, seen from the file of answers, and
    prompt_ids has one pad for each.

    Args:
        config: The data and the sampling.
        llm: The target, here or behind servers.
        path: The file of answers; its record is beside it.
        tell: Receives lines for the user.

    Returns:
        The number of prompts with an answer.

    Raises:
        InputError: A prompt is invalid, or the file is of other settings.
    """
    skipped = Skipped() if config.skip_bad_lines else None
    no_media = REMOTE_MEDIA if isinstance(llm, RemoteTarget) else NO_TOWER if llm.media is None else None
    prompts = list(read_prompts(config, skipped, no_media))
    with locked(path.with_suffix(".lock"), str(path)):
        return _regenerate(config, llm, prompts, path, tell, skipped)


def _regenerate(
    config: TrainConfig,
    llm: LLM | RemoteTarget,
    prompts: Sequence[PromptLine],
    path: Path,
    tell: Callable[[str], None],
    skipped: Skipped | None,
) -> int:
    progress, size = Progress(config, prompts, path), max(GROUP, TURNS * llm.slots)
    if done := progress.done:
        tell(f"{done} of {len(prompts)} were answered before")
    options = {"initial": done, "unit": "prompt", "leave": True}
    with progress_bar(description="answering", total=len(prompts), **options) as bar:
        for start in range(done, len(prompts), size):
            group = prompts[start : start + size]
            lines = _answered(config, llm, group, start, path.parent, skipped)
            progress.add(lines, len(group))
            bar.update(len(group))
    if skipped is not None and skipped.count:
        tell(f"{skipped.count} lines left out, the first: {skipped.first}")
    if unanswered := progress.unanswered:
        tell(f"{unanswered} prompts have no answer: left out, or without room in the target's {llm.max_len} positions")
    return len(prompts) - unanswered


def _prompt(
    llm: LLM | RemoteTarget, talk: str | list[dict], line: PromptLine, thinking: bool | None
) -> tuple[Prompt, list[int], int]:
    """A text or a conversation as `LLM.generate` takes it, its token ids, and how many there are with its media."""
    if isinstance(talk, str):
        ids = llm.encode(talk)
        return ids, ids, len(ids)
    messages, parts = split_conversation(talk, line.where, line.directory)
    ids = llm.encode_chat(messages, thinking, line.tools)
    if not parts or isinstance(llm, RemoteTarget):
        return ids, ids, len(ids)
    # Decoded once, for the length and for the answer.
    parts = [replace(part, source=llm.media_reader().read(part)) for part in parts]
    expanded, _ = llm.with_media(ids, parts)
    return {"prompt_token_ids": ids, "multi_modal_data": by_kind(parts)}, ids, len(expanded)


def _answered(
    config: TrainConfig,
    llm: LLM | RemoteTarget,
    group: Sequence[PromptLine],
    start: int,
    output: Path,
    skipped: Skipped | None,
) -> list[dict]:
    """The lines of a group, in the order of its prompts. A prompt that leaves no room is not answered."""
    lines: list[list[dict]] = [[] for _ in group]
    talks: list[list[dict]] = [[] for _ in group]
    left = {i: ([*line.prompt] if isinstance(line.prompt, list) else line.prompt) for i, line in enumerate(group)}
    while left:
        which, prompts, encoded, params = [], [], [], []
        for i, prompt in left.items():
            if not isinstance(prompt, str):
                while prompt:
                    talks[i].append(prompt.pop(0))
                    if _is_answered(talks[i][-1], prompt):
                        break
            try:
                talk = prompt if isinstance(prompt, str) else talks[i]
                prompt, ids, length = _prompt(llm, talk, group[i], config.thinking)
            except InputError as e:
                fault(str(at_line(e, group[i].where)), skipped)
                continue
            if length < llm.max_len:
                which.append(i)
                prompts.append(prompt)
                encoded.append(ids)
                most, seed = min(config.max_new_tokens, llm.max_len - length), (config.seed + start + i) % 2**32
                params.append(SamplingParams(temperature=config.temperature, max_tokens=most, seed=seed))
        answers = llm.generate(prompts, params, progress=False)
        rest = {}
        for i, ids, answer in zip(which, encoded, answers, strict=True):
            line = {"source": start + i, "prompt_ids": ids, "response_ids": answer.token_ids}
            if not isinstance(turns := left[i], str):
                answered = {"role": "assistant", "content": _content(answer.text or "")}
                line["messages"] = [*talks[i], answered]
                if group[i].tools:
                    line["tools"] = group[i].tools
                if group[i].parts:
                    line[DIRECTORY] = os.path.relpath(group[i].directory, output)
                # The data's own calls go before their results.
                if not turns or turns[0]["role"] != "assistant":
                    talks[i].append(answered)
                if any(m["role"] in ("user", "tool") for m in turns):
                    rest[i] = turns
            lines[i].append(line)
        left = rest
    return [line for each in lines for line in each]


def _content(text: str) -> str:
    """An answer without its thought, which templates leave out of earlier turns."""
    return text.rpartition("</think>")[2].lstrip("\n")
