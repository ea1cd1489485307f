"""Sessions of clients, cut down to their shapes: scripts/clients/check.py writes them, and tests ask a server so."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.mock_runner import TURNS

# Where a body has the conversation.
CONVERSATION = "messages", "input"
# Values that a server makes up and a client sends back.
NAMES = re.compile(r'"(id|item_id|call_id|tool_use_id|signature|encrypted_content)": ?"([^"]+)"')
# Texts that mean something to a server.
KEPT = {"arguments", "call_id", "encrypted_content", "id", "name", "namespace", "role", "signature", "status"}
KEPT |= {"tool_call_id", "tool_use_id", "type"}
# Of a tool, in our own words.
PROSE = {"description": "What it does.", "definition": "start: /(.|\\n)+/"}
BILLING = "x-anthropic-billing-header"
HEADERS = "anthropic-beta", "anthropic-version"


def names(answer: str, turn: int) -> dict[str, str]:
    """What an answer calls its items and calls, by placeholders: the same ones for another server's answer."""
    counts: Counter[str] = Counter()
    found: dict[str, str] = {}
    for key, name in NAMES.findall(answer):
        if name not in found.values():
            kind = name.partition("_")[0] if key not in ("signature", "encrypted_content") else key
            counts[kind] += 1
            found[f"<{kind} {turn}.{counts[kind]}>"] = name
    return found


def renamed(text: str, known: Mapping[str, str]) -> str:
    """A text with some words replaced."""
    return re.sub("|".join(map(re.escape, known)) or "(?!)", lambda match: known[match[0]], text)


class Cutter:
    """Replaces the texts of a client by short ones, each always by the same.

    Args:
        script: What the model says, which stays.
        task: What it is asked to do. It stays alone where it stands in a text, and so does the number of its turns.
        called: Tools whose definitions stay, beside the first of each type.
    """

    def __init__(self, script: Sequence[str], task: str, called: set[str]):
        self._script, self._called = "\n".join(script), called
        self._own = re.compile(f"{re.escape(task)}|{TURNS.pattern}")
        self._texts = dict[str, str]()

    def cut(self, value: Any, key: str = "") -> Any:
        """A value with short texts."""
        match value:
            case str() if found := self._own.search(value):
                return found[0]
            case str() if key not in KEPT and not (len(value) < 24 and " " not in value) and value not in self._script:
                start = f"{BILLING}: " if value.startswith(BILLING) else ""
                return self._texts.setdefault(value, f"{start}text {len(self._texts)}")
            case list() if key == "tools":
                return list(self._tools(value))
            case list():
                return [self.cut(each, key) for each in value]
            case dict():
                return {k: self.cut(v, k) for k, v in value.items()}
        return value

    def _tools(self, tools: list[dict]) -> Iterator[dict]:
        types = set()
        for tool in tools:
            function, kind = tool.get("function", tool), (tool.get("type"), tuple(sorted(tool)))
            if function.get("name") in self._called or (kind[0] not in (None, "function") and kind not in types):
                types.add(kind)
                yield _plain(tool)


def _plain(value: Any, known: Mapping[str, str] = PROSE) -> Any:
    """A tool without its prose; within its schema, without descriptions."""
    if isinstance(value, dict):
        texts = {k: known.get(k, v) if isinstance(v, str) else _plain(v, {}) for k, v in value.items()}
        return {k: v for k, v in texts.items() if known or k != "description" or not isinstance(v, str)}
    return [_plain(each, known) for each in value] if isinstance(value, list) else value


def recorded(exchanges: Sequence[Mapping[str, Any]], script: Sequence[str], task: str, folder: str) -> dict:
    """A session, as short as its shape.

    Args:
        exchanges: ``{"path", "headers", "body", "answer"}`` of each turn, texts as they went over the wire.
        script: What the model said.
        task: What it was asked to do.
        folder: Where the client worked.
    """
    called = set(re.findall(r"<function=(.+?)>", "".join(script)))
    cutter, known, turns, before = Cutter(script, task, called), dict[str, str](), list[dict](), list[Any]()
    key = next(key for key in CONVERSATION if key in json.loads(exchanges[0]["body"]))
    for turn, exchange in enumerate(exchanges):
        body = cutter.cut(json.loads(renamed(exchange["body"], known)))
        entries = body.pop(key)
        changed = {i: entry for i, entry in enumerate(entries) if before[i : i + 1] != [entry]}
        fields = {name: value for name, value in body.items() if not turns or turns[0]["fields"].get(name) != value}
        turns.append({"fields": fields, "entries": changed, "length": len(entries)})
        before = entries
        known = {name: placeholder for placeholder, name in names(exchange["answer"], turn).items()} | known
    headers = {name.lower(): value for name, value in exchanges[0]["headers"].items() if name.lower() in HEADERS}
    session = {"path": exchanges[0]["path"], "headers": headers, "key": key, "script": list(script), "turns": turns}
    return json.loads(json.dumps(session).replace(folder, "/repair"))


def as_text(session: Mapping[str, Any]) -> str:
    """A session as JSON, with a line for each turn."""
    lists = {"script", "turns"}
    lines = [
        f'"{key}": [\n  ' + ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in value) + "\n ]"
        if key in lists
        else f'"{key}": {json.dumps(value)}'
        for key, value in session.items()
    ]
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def bodies(session: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[dict]:
    """The bodies of a session's turns.

    Args:
        session: What `recorded` gives.
        known: What placeholders stand for; it is looked at when a body is asked for.
    """
    entries: dict[int, Any] = {}
    for turn in session["turns"]:
        entries |= {int(i): entry for i, entry in turn["entries"].items()}
        conversation = [entries[i] for i in range(turn["length"])]
        body = session["turns"][0]["fields"] | turn["fields"] | {session["key"]: conversation}
        yield json.loads(renamed(json.dumps(body, ensure_ascii=False), known))
