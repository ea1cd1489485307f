"""--help of every script, in an environment that has the package's requirements and no extra."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Modules that are in scripts/ and are no scripts: one is a hook of mkdocs, two are collected by pytest, three run in
# environments of clients.
NO_SCRIPTS = {"pages/site.py", "others/others_kits.py", "others/others_plugin.py"}
NO_SCRIPTS |= {f"clients/sessions/{name}.py" for name in ("file_tools", "openai_agents_loop", "pydantic_ai_loop")}
HIDE_EXTRAS = """
import contextlib, importlib.metadata, io, json, runpy, sys
from importlib.machinery import PathFinder
from packaging.requirements import Requirement

def name_of(text):
    return text.lower().replace("_", "-").replace(".", "-")

required, waiting = set(), [(Requirement(text), "") for text in json.loads(sys.argv[1])]
while waiting:
    requirement, extra = waiting.pop()
    name = name_of(requirement.name)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        continue
    for wanted in {"", *requirement.extras} - {e for n, e in required if n == name}:
        required.add((name, wanted))
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            waiting += [(Requirement(text), wanted) for text in importlib.metadata.requires(name) or []]
names = {name for name, _ in required}
distributions = importlib.metadata.packages_distributions()
hidden = {
    module for module, owners in distributions.items()
    if not names & set(map(name_of, owners)) and module not in ("dflash_jax", "pkg_resources", "_distutils_hack")
}
find_spec = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, *args: None if name.partition(".")[0] in hidden else find_spec(name, *args)
)
results = {}
for path in sys.argv[2:]:
    sys.argv = [path, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
            results[path] = "no --help"
        except SystemExit as end:
            results[path] = f"exit {end.code}" if end.code else out.getvalue()
        except BaseException as error:
            results[path] = repr(error)
print(json.dumps({"hidden": sorted(hidden), "results": results}))
"""


def test_help_of_every_script_needs_no_extra():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    scripts = [
        path
        for folder in ("scripts", "convert")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT / folder)) not in NO_SCRIPTS
    ]
    command = [sys.executable, "-c", HIDE_EXTRAS, json.dumps(requirements), *map(str, scripts)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {"grain", "fastapi", "torch", "gguf", "openai", "httpx"} <= set(answer["hidden"])
    assert not {"jax", "flax", "numpy", "transformers", "tqdm"} & set(answer["hidden"])
    wrong = {path: text for path, text in answer["results"].items() if not text.startswith("usage: ")}
    assert not wrong
