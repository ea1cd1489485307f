"""README.md and docs/ as text: their fenced blocks of code."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(<!-- run -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The page's file.
        line: The line of the page on which the code begins.
        language: Of the fence.
        code: The text inside.
        runs: Whether ``<!-- run -->`` stands before it.
    """

    page: Path
    line: int
    language: str
    code: str
    runs: bool


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of one language in a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(page, line, match[2], match[3], match[1] is not None))
    return [block for block in found if block.language == language]


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, with continued lines joined; no comments, no redirections."""
    lines = block.code.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[: words.index(">")] if ">" in words else words for words in split if words]
