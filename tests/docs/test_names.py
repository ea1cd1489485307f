"""What pages name exists: files and modules. `tests/frontend/test_vllm_names.py` runs the table of the Python API."""

import importlib
import re

import pytest

from tests.docs.pages import PAGES, ROOT

PATH = re.compile(r"\b(?:scripts|tests|configs|benchmarks|convert|examples|docs|dflash_jax|tools)/[\w./-]*\w")
MODULE = re.compile(r"(?<![\w/])(?:dflash_jax|tools)(?:\.\w+)+")


def text_of(page) -> str:
    """A page's text. The changelog's tables of old names are left out but for their column of new ones."""
    text = page.read_text(encoding="utf-8")
    if page.name == "changelog.md":
        text = re.sub(r"^\| `[^|]*\|", "|", text, flags=re.MULTILINE)
    return text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page):
    paths = set(PATH.findall(text_of(page)))
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_every_file_of_a_requests_way_exists():
    """Its paths are relative to the package."""
    text = (ROOT / "docs" / "requests_way.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:\w+/)+[\w.]*)`", text)) - {"dflash_jax/"}
    assert len(paths) > 40
    assert not [path for path in sorted(paths) if not (ROOT / "dflash_jax" / path).exists()]


def resolve(name: str):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            continue
        for attribute in parts[split:]:
            value = getattr(value, attribute)
        return value
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page):
    for name in sorted(set(MODULE.findall(text_of(page)))):
        resolve(name)


SHOWN = re.compile(r"^```\w+\n# ((?:examples|dflash_jax)/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_what_a_page_shows_of_a_file_is_in_the_file():
    """A block whose first line names a file."""
    shown = [each for page in PAGES for each in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert {path.rpartition("/")[2] for path, _ in shown} >= {"qwen2.py", "phi3.py", "pyproject.toml", "llama.py"}
    for path, code in shown:
        assert code.strip() in (ROOT / path).read_text(encoding="utf-8"), path


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
