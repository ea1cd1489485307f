"""lm-eval's local-completions against our server, on two tiny tasks whose results are known.

The bundled model's own continuation is likelier than another token after each prompt (multiple choice: accuracy 1), and
its greedy text comes back (generation: exact match 1). lm-eval tokenises through the server. It needs
`pip install "lm-eval[api]"`, which is not among the test extras for its size: in another environment, name that one's
Python with --lm-eval-python.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from dflash_jax import LLM, SamplingParams

# --help works without it.
with contextlib.suppress(ModuleNotFoundError):
    import httpx

PROMPTS = (
    "def read_config(path):",
    "class Parser:\n    def",
    "import os\n\n\ndef",
    "for i in range(10):",
    "return self.",
)
NEW_TOKENS = 16

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}]
"""
TEXT = f"""
output_type: generate_until
doc_to_target: text
generation_kwargs: {{until: ["<|endoftext|>"], max_gen_toks: {NEW_TOKENS}, temperature: 0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def documents(llm: LLM) -> list[dict]:
    """Prompts after which a choice is one token, with the likeliest token, another one, and the greedy text."""
    assert llm.tokenizer is not None
    found = []
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=5)
    for prompt, completion in zip(PROMPTS, llm.generate(list(PROMPTS), params), strict=True):
        assert completion.logprobs is not None
        ids = llm.encode(prompt)
        tokens = [(i, llm.tokenizer.decode([i])) for i in completion.logprobs[0]["top"]]
        apart = [text for i, text in tokens if text.strip() and llm.encode(prompt + text) == [*ids, i]]
        if len(apart) > 1 and apart[0] == tokens[0][1]:
            found.append({"prompt": prompt, "choices": apart[:2], "gold": 0, "text": completion.text})
    return found


def evaluate(python: str, url: str, folder: Path, tasks: list[str]) -> dict:
    model = f"model=default,base_url={url}/v1/completions,num_concurrent=4,max_retries=1,tokenizer_backend=remote"
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", ",".join(tasks), "--include_path", str(folder), "--output_path", str(folder / "out")]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hub"),
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run(command, check=True, env=environment, timeout=1800)
    (path,) = folder.glob("out/**/results_*.json")
    return json.loads(path.read_text(encoding="utf-8"))["results"]


@contextlib.contextmanager
def serving(log: Path) -> Iterator[str]:
    """The address of a server that is ready; it logs to a file, which nothing needs to drain."""
    command = [sys.executable, "-m", "dflash_jax.serve", "--bundled", "--port", "0"]
    command += ["--slots", "4", "--max-len", "1024"]
    with log.open("w", encoding="utf-8") as file, subprocess.Popen(command, stderr=file) as server:
        try:
            while not (m := re.search(r"listening on (http://[\d.:]+)", log.read_text(encoding="utf-8"))):
                if server.poll() is not None:
                    raise SystemExit(log.read_text(encoding="utf-8"))
                time.sleep(0.2)
            while httpx.get(f"{m[1]}/ready", timeout=None).status_code != 200:
                time.sleep(1)
            yield m[1]
        finally:
            server.kill()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lm-eval-python", default=sys.executable, metavar="PATH", help="default: this Python")
    args = p.parse_args()
    if find_spec("httpx") is None:
        p.error('this needs the extra server: pip install "dflash-jax[server]"')
    asked = documents(LLM())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps(d) + "\n" for d in asked), encoding="utf-8")
        for task, more in (("tiny_choice", CHOICE), ("tiny_text", TEXT)):
            (folder / f"{task}.yaml").write_text(TASK.format(name=task, data=data) + more, encoding="utf-8")
        with serving(folder / "server.log") as url:
            results = evaluate(args.lm_eval_python, url, folder, ["tiny_choice", "tiny_text"])
    found = {"accuracy": results["tiny_choice"]["acc,none"], "exact match": results["tiny_text"]["exact_match,none"]}
    print(f"{len(asked)} documents: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    return 0 if asked and set(found.values()) == {1.0} else 1


if __name__ == "__main__":
    sys.exit(main())
