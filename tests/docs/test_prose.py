"""How pages read: short paragraphs and cells, and one meaning for each word (CONTRIBUTING.md, Words)."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

PARAGRAPH_WORDS, CELL_WORDS = 90, 25
# flags.md is made by a script; a changelog's cells list names.
LEFT_OUT = {"flags.md", "changelog.md"}
# Being rewritten.
LEFT_OUT |= {"cluster.md"}
NOTES = ROOT / "benchmarks" / "NOTES.md"
READ = [*(page for page in PAGES if page.name not in LEFT_OUT), NOTES]
# A table of NOTES.md with this head is a record: each line says what a change was to bring and brought, and stays as it
# was written.
RECORD = ["prediction", "change", "result"]

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
TARGET = re.compile(r"\]\([^)\s]*\)")


def words(text: str) -> int:
    """The number of words of Markdown text: a link's target is none, and a sign by itself is none."""
    return sum(any(map(str.isalnum, word)) for word in TARGET.sub("]", text).split())


def without_code(text: str) -> str:
    """A page's text with blocks of code and comments blank, its lines as many as before."""
    for pattern in (FENCE, COMMENT):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    lines, is_list = [], False
    for line in text.splitlines():
        if line.strip():
            if ITEM.match(line):
                is_list = True
            elif not line.startswith(" "):
                is_list = False
        lines.append("" if line.startswith("    ") and not is_list else line)
    return "\n".join(lines)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The first line's number and the text of each paragraph; an item of a list is one by itself."""
    start, parts = 0, []
    for number, line in enumerate([*without_code(text).splitlines(), ""], 1):
        ends = not line.strip() or line.lstrip().startswith(("#", "|"))
        if parts and (ends or ITEM.match(line)):
            yield start, " ".join(parts)
            parts = []
        if not ends:
            start = start if parts else number
            parts.append(line.strip())


def tables(text: str) -> Iterator[list[tuple[int, list[str]]]]:
    """The lines of each table, with their numbers, as cells."""
    table = []
    for number, line in enumerate([*without_code(text).splitlines(), ""], 1):
        if line.lstrip().startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            table.append((number, [cell.strip() for cell in cells]))
        elif table:
            yield table
            table = []


def check(faults: list[str]) -> None:
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_paragraph_has_at_most_90_words(page):
    text = page.read_text(encoding="utf-8")
    check(
        [
            f"{page.name}:{line}: {words(paragraph)} words: {paragraph[:60]}"
            for line, paragraph in paragraphs(text)
            if words(paragraph) > PARAGRAPH_WORDS
        ]
    )


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_cell_of_a_table_has_at_most_25_words(page):
    check(
        [
            f"{page.name}:{line}: {words(cell)} words: {cell[:60]}"
            for table in tables(page.read_text(encoding="utf-8"))
            if page != NOTES or table[0][1] != RECORD
            for line, cells in table
            for cell in cells
            # What is code alone is shown as it is, such as a message.
            if words(cell) > CELL_WORDS and not re.fullmatch(r"`[^`]*`", cell)
        ]
    )


SOURCES = [
    file
    for folder in ("dflash_jax", "tools", "scripts", "examples", "convert")
    for pattern in ("*.py", "*.cc", "*.js", "*.toml", "*.html")
    for file in sorted((ROOT / folder).rglob(pattern))
    if "vendor" not in file.parts
]
# "Behind" is for place: what is on the other side of an interface, what somebody leaves, who is late.
PLACE = re.compile(
    r"behind (?:HTTP|(?:one|an?) (?:address|proxy)|servers|the (?:server|window)|a Unix socket|/server_info|`\w+`)"
    r"|\"behind\"|lea(?:ves?|ving|ft) (?:[\w`]+ ){0,4}behind|is never behind",
    re.IGNORECASE,
)


def prose_of(file: Path) -> str:
    """A file's text on one line, without the signs of comments at the beginning of its lines."""
    return " ".join(line.strip().lstrip("#/* ") for line in file.read_text(encoding="utf-8").splitlines())


def places_of(word: re.Pattern, allowed: re.Pattern, text: str) -> list[str]:
    """Where a word stands outside of what is allowed, with the text around it."""
    spans = [match.span() for match in allowed.finditer(text)]
    return [
        text[max(0, match.start() - 50) : match.end() + 30]
        for match in word.finditer(text)
        if not any(start <= match.start() < end for start, end in spans)
    ]


@pytest.mark.parametrize("folder", ["pages", *sorted({file.relative_to(ROOT).parts[0] for file in SOURCES})])
def test_behind_is_not_said_of_order(folder):
    files = [file for file in SOURCES if file.relative_to(ROOT).parts[0] == folder] or READ
    word = re.compile("behind", re.IGNORECASE)
    check([f"{file.relative_to(ROOT)}: {place}" for file in files for place in places_of(word, PLACE, prose_of(file))])


# A replay is that of a record onto a recurrent state.
WITHOUT_REPLAYS = ("benchmarking", "cli", "cluster", "engine", "frontend", "media", "parallel", "server", "workers")


def test_replay_is_said_of_recurrent_states_only():
    package = ROOT / "dflash_jax"
    files = [file for folder in WITHOUT_REPLAYS for file in sorted((package / folder).rglob("*.py"))]
    # Of records, states and accepted tokens it may be said anywhere.
    allowed = re.compile(r"[^.]*\b(?:records?|recurrent|state|accepted)\b[^.]*", re.IGNORECASE)
    check(
        [
            f"{file.relative_to(ROOT)}: {place}"
            for file in files
            for place in places_of(re.compile("replay", re.IGNORECASE), allowed, prose_of(file))
        ]
    )


def glossary() -> list[list[str]]:
    """The lines of CONTRIBUTING.md's tables of words."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Words\n")[1].split("\n## ")[0]
    return [cells for table in tables(text) for _, cells in table[2:]]


def test_a_word_has_one_line_of_the_glossary():
    named = [word for word, _ in glossary() for word in word.split(", ")]
    assert len(named) > 40
    assert sorted(set(named)) == sorted(named)
