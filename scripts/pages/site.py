"""A hook of mkdocs: pages may link to files of the repository outside docs/, as ``../benchmarks/cpu.md``.

GitHub follows such links as they are. On the site the file is added under its own path, and the link points there. Such
a file's links into docs/ lose that folder, which the site does not have.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()\.\./([\w./-]+)")


def on_files(files, config):
    """Adds every file that a page links to, and what those Markdown files link to in turn."""
    pages = [path.read_text(encoding="utf-8") for path in Path(config.docs_dir).glob("*.md")]
    waiting = {name for text in pages for _, name in LINK.findall(text)}
    added: set[str] = set()
    while waiting:
        name = waiting.pop()
        path = ROOT / name
        added.add(name)
        if not path.is_file():
            continue  # mkdocs reports the link.
        files.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".md":
            linked = re.findall(r"\]\(([\w.-]+)\)", path.read_text(encoding="utf-8"))
            waiting |= {str(Path(name).parent / other) for other in linked} - added
    return files


def on_page_markdown(markdown, **_):
    return LINK.sub(r"\1\2", markdown).replace("](docs/", "](")
