"""vLLM's and SGLang's server tests against our server: which pass, which fail, which are not about a server like ours.

    pip download --no-deps --no-binary :all: vllm      # a source distribution; or from its page
    pip download --no-deps sglang
    python scripts/others/run.py --vllm DIR --sglang DIR --out benchmarks/others_tests.md

DIR holds the unpacked source distribution or wheel. Nothing in it is changed, and nothing is fetched. Needs
`pip install pytest-asyncio requests jsonschema` beside the test extra. The servers run on this machine, with the
bundled pair or with --target and --draft; what fails runs again with --second-target and --second-draft, and passes if
it passes there: some tests need a model that answers, others one that thinks. "Another model" is where the server does
what is asked for and the assertion is about what the model says, or about its size. A test is not ours where it is
about a class of their package, LoRA, embeddings, images, watermarks or caches of several servers. `NEEDS` has them all.
"""

import argparse
import collections
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.options.parser import Parser
from dflash_jax.parallel.devices import versions
from dflash_jax.process import exit_code

HERE = Path(__file__).parent
DEFAULTS = (None, TINY / "target", TINY / "draft")
# Of a suite: the folders whose fixtures its tests use.
CONFTESTS = ("tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest")
# vLLM's modules that talk to a server of text, by folder.
MODULES = {
    "openai/completion": ["completion", "prompt_validation", "token_in_token_out"],
    "openai/chat_completion": [
        "chat",
        "chat_completion",
        "chat_echo",
        "chat_logit_bias_validation",
        "completion_with_function_calling",
        "enable_force_include_usage",
        "include_reasoning",
        "logprob_token_ids",
        "root_path",
        "thinking_token_budget",
        "batched_chat_completions",
    ],
    "openai": ["chunked_prompt", "return_token_ids", "return_tokens_as_ids"],
    "openai/models": ["models"],
    "openai/responses": ["simple"],
    "anthropic": ["messages"],
    "serve/instrumentator": ["basic"],
    "serve/tokenize": ["tokenization"],
    "serve/middleware": ["optional_middleware"],
}
PASS, FAIL, MODEL, NOT_OURS = VERDICTS = ("pass", "fail", "another model", "not ours")
# What a test that does not pass needs: a pattern of its name, one of its message, the verdict, and the need.
# `MODEL`: the server did what is asked for, and the assertion is about the words or the size of the model.
NEEDS = [
    ("", r"own classes|'?Stub'?\b|Mock object", NOT_OURS, "their own classes"),
    (r"lora|test_check_models", "", NOT_OURS, "LoRA"),
    (r"image|vision|audio", "", NOT_OURS, "images"),
    ("", r"flag: --watermark-config", NOT_OURS, "watermarks"),
    (r"v2_endpoint_accepts", "", NOT_OURS, "a model of embeddings"),
    ("", r"kv_transfer_params", NOT_OURS, "caches sent between servers"),
    ("", r"VLLM_VERSION|\bfixture '", NOT_OURS, "their own package's version or fixtures"),
    ("", r"' not found in '|answers correct: ", MODEL, "an answer that is right"),
    (r"test_complex_message_content|test_structured_outputs_choice", r"==|!=", MODEL, "an answer that is right"),
    (r"complex_json", r"does not match any", MODEL, "an answer that is right"),
    ("", r"'(length|max_tokens|incomplete|response.incomplete)' == '", MODEL, "an answer that ends by itself"),
    (r"test_streaming_", r"Unclosed events|assert None is not None", MODEL, "an answer that ends by itself"),
    ("", r"stop, but got: length", MODEL, "an answer that ends by itself"),
    ("", r"is not in list|1024 not less than 1024", MODEL, "a thought that ends by itself"),
    (r"separate_reasoning", r"0 not greater than 0", MODEL, "a thought that ends by itself"),
    (r"test_include_reasoning|test_reasoning", r"Expected content|assert None", MODEL, "a thought that ends by itself"),
    (r"test_function_tool_use\[.*auto", "", MODEL, "a model that calls tools by itself"),
    (r"test_function_tool_use\[plain-True", "", MODEL, "a thought that ends by itself"),
    (r"json|grammar|test_named_tool_use", r"JSONDecodeError", MODEL, "an answer that ends by itself"),
    (r"test_response_format_json", r"AssertionError: {}", MODEL, "an answer that is right"),
    (r"test_more_than_one_prompt_logprobs", r"assert \d == 1", MODEL, "a template whose tokens the model foresees"),
    (r"test_chat_completion_with_(tool_use|emoji)", r"assert False", MODEL, "Qwen2.5's chat template"),
    (r"test_single_completion", r"assert 9 == 5", MODEL, "a tokenizer's number of tokens"),
    ("", r"ids are 0 to 511|larger vocabulary", MODEL, "a larger vocabulary"),
    ("", r"do not fit: this model's maximum context length is 8192", MODEL, "a longer context"),
]


def run_suite(suite: str, tests: list[str], directory: Path, args, names: list[str]) -> list[dict]:
    """Outcomes of ``tests``: ``{"test", "outcome", "reason"}``, of both pairs as `of_both` says."""
    options = suite, tests, directory, args, names
    found = run_pytest(*options, (args.target, args.draft))
    if args.second_target is None:
        return found
    again = [result["test"] for result in found if judged(result)[0] in (FAIL, MODEL)]
    if again:
        second = {r["test"]: r for r in run_pytest(*options, (args.second_target, args.second_draft), again)}
        found = [of_both(result, second.get(result["test"], result)) for result in found]
    return found


def of_both(first: dict, second: dict) -> dict:
    """The outcome of a test that ran with two models: it passes with either, and fails with either."""
    return min(first, second, key=lambda result: VERDICTS.index(judged(result)[0]))


def run_pytest(
    suite: str, tests: list[str], directory: Path, args, names: list[str], pair: tuple, only: Sequence[str] = ()
) -> list[dict]:
    """Outcomes with a pair of models; ``only``: ids of tests, others are left out. Those that --keep has are not run
    again.
    """
    with tempfile.TemporaryDirectory() as results:
        folder = Path(results) if args.keep is None else args.keep
        path = folder / f"{suite}-{'second' if pair[0] == args.second_target else 'first'}.jsonl"
        before = outcomes(path)
        environment = os.environ | {
            "OTHERS_TARGET": str(pair[0]),
            "OTHERS_DRAFT": str(pair[1]),
            "OTHERS_ONLY": "\n".join(only),
            "OTHERS_DONE": "\n".join(before),
            "OTHERS_RESULTS": str(path),
            "OTHERS_NAMES": " ".join(names),
            f"OTHERS_{suite.upper()}": str(directory),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "others_plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
        ]
        command += [
            "--noconftest",
            "--tb=short",
            "--continue-on-collection-errors",
            "--import-mode=importlib",
            f"--rootdir={directory}",
            *tests,
        ]
        command += ["-k", args.k] if args.k else []
        command += [part for name in CONFTESTS for part in ("-p", name)] if suite == "vllm" else []
        subprocess.run(command, env=environment, stdout=None if args.verbose else subprocess.DEVNULL, check=False)
        if not path.exists():
            raise InputError(f"{suite}: pytest collected no test; --verbose shows why")
        return [result for test, result in outcomes(path).items() if not only or test in only]


def outcomes(path: Path) -> dict[str, dict]:
    """Results of a file by test; {} where there is no file."""
    found: dict[str, dict] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in map(json.loads, lines):
        # A failure holds: of a part of a test (`subTest`) as well as of its teardown.
        if line["test"] not in found or found[line["test"]]["outcome"] != "failed":
            found[line["test"]] = line
    return found


def judged(result: dict) -> tuple[str, str]:
    """(one of `VERDICTS`, and why)."""
    if result["outcome"] == "passed":
        return PASS, ""
    reason = result["reason"].removeprefix("Skipped: ")
    for name, message, verdict, need in NEEDS:
        is_named = re.search(name, result["test"].rpartition("::")[2], re.IGNORECASE)
        if is_named and re.search(message, reason, re.IGNORECASE):
            return verdict, need
    return NOT_OURS if result["outcome"] == "skipped" else FAIL, reason


def table(suites: dict[str, list[dict]], heading: str) -> str:
    """The page: counts of each module, then failures, then what others need."""
    lines = [heading, "", f"| suite | module | {' | '.join(VERDICTS)} |", "|---|---|" + "---|" * len(VERDICTS)]
    failures, reasons = [], collections.Counter()
    for suite, results in suites.items():
        counts: dict[str, collections.Counter] = {}
        for result in sorted(results, key=lambda r: r["test"]):
            verdict, reason = judged(result)
            path, _, rest = result["test"].partition("::")
            module = rest.partition("::")[0] if suite == "sglang" else Path(path).as_posix().removeprefix("tests/")
            counts.setdefault(module, collections.Counter())[verdict] += 1
            if verdict == FAIL:
                failures.append(f"- `{module}` `{result['test'].rpartition('::')[2]}`: {reason}")
            elif verdict != PASS:
                reasons[suite, verdict, reason.partition(" (")[0][:160]] += 1
        total = sum(counts.values(), collections.Counter())
        for module, count in [*counts.items(), ("**all**", total)]:
            lines.append(f"| {suite} | {module} | {' | '.join(str(count[verdict]) for verdict in VERDICTS)} |")
    lines += ["", "Failures:", "", *(failures or ["none"]), "", "What others need:", ""]
    lines += [f"- {suite}, {verdict}, {count}: {reason}" for (suite, verdict, reason), count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def modules(directory: Path) -> list[Path]:
    """Files of `MODULES` that this version of vLLM has."""
    root = directory / "tests/entrypoints"
    paths = [root / folder / f"test_{name}.py" for folder, names in MODULES.items() for name in names]
    return [path for path in paths if path.exists()]


def model_names(directory: Path) -> list[str]:
    """The names that vLLM's tests ask for."""
    found = set()
    for path in modules(directory):
        found |= set(re.findall(r'^ *MODEL\w* = "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE | re.I))
    return sorted(found)


def heading(args) -> str:
    """What was run: the command without its paths, the day, versions, the model."""
    names = ("vllm", "sglang", "target", "draft", "second_target", "second_draft")
    given = [f"--{name.replace('_', '-')} DIR" for name in names if getattr(args, name) not in DEFAULTS]
    command = f"python scripts/others/run.py {' '.join(given)}".replace("--draft DIR", f"--draft {args.draft}")
    wheels = [] if args.sglang is None else [d.stem for d in args.sglang.glob("sglang-*.dist-info")]
    sources = [] if args.vllm is None else [args.vllm.name]
    found = ", ".join([*wheels, *sources, versions()])
    return f"# Tests of others against our server\n\n`{command}`, {datetime.date.today()}: {found}."


def run(argv: list[str] | None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="an unpacked source distribution")
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="an unpacked wheel")
    parser.add_argument("--target", default=TINY / "target", metavar="PATH", help="default: the bundled one")
    parser.add_argument("--draft", default=TINY / "draft", metavar="PATH")
    parser.add_argument("--second-target", metavar="PATH", help="for what fails with the first")
    parser.add_argument("--second-draft", metavar="PATH", help="its drafter")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep outcomes there, and go on from those it has")
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's: only these tests")
    parser.add_argument("--verbose", action="store_true", help="pytest's output, too")
    args = parser.parse_args(argv)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    suites = {}
    if args.sglang is not None:
        if not (args.sglang / "sglang/test/kits").is_dir():
            raise InputError(f"--sglang {args.sglang}: there is no sglang/test/kits")
        suites["sglang"] = run_suite("sglang", [str(HERE / "others_kits.py")], args.sglang.resolve(), args, ["default"])
    if args.vllm is not None:
        directory = args.vllm.resolve()
        tests = [str(path) for path in modules(directory)]
        if not tests:
            raise InputError(f"--vllm {args.vllm}: there is no tests/entrypoints")
        suites["vllm"] = run_suite("vllm", tests, directory, args, ["default", *model_names(directory)])
    if not suites:
        raise InputError("give --vllm, --sglang, or both")
    text = table(suites, heading(args))
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: run(None)))
