"""dflash batch: its files, and whole runs with the bundled pair."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from io import BytesIO
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax import LLM, SamplingParams
from dflash_jax.cli import batch
from dflash_jax.errors import EngineError
from dflash_jax.server.batch_files import LONGEST_ID, Done, Entry, Fault, Output, entries, lines, open_input
from tests.helpers import without_kernels_line

MESSAGES = [{"role": "user", "content": "Write the function `clamp`."}]
CHAT = "/v1/chat/completions"
URLS = frozenset(batch.URLS)
SMALL = ["--bundled", "--slots", "4", "--max-len", "512", "--prefix-bytes", "0"]


def request(custom_id: str, url=CHAT, **body) -> dict:
    body = {"messages": MESSAGES, "max_tokens": 12} | body if url == CHAT else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def as_lines(*values) -> bytes:
    return b"".join(v if isinstance(v, bytes) else json.dumps(v).encode() + b"\n" for v in values)


def answers(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# The input.


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=6), st.integers(1, 7))
def test_lines_in_any_pieces(given_lines, piece):
    class Slow(BytesIO):
        def read(self, _):
            return super().read(piece)

    found = list(lines(Slow(b"\n".join(given_lines)), 4))
    expected = [(i + 1, None if len(line) > 4 else line) for i, line in enumerate(given_lines)]
    assert found == [(i, line) for i, line in expected if line is None or line.strip()]


HOSTILE = {
    "no JSON": (b"{x\n", "invalid_json"),
    "no UTF-8": (b'{"custom_id": "\xff"}\n', "invalid_json"),
    "binary": (bytes(range(11, 256)) + b"\n", "invalid_json"),
    "deep": (b"[" * 100_000 + b"\n", "invalid_json"),
    "a long number": (b"1" * 10_000 + b"\n", "invalid_json"),
    "no object": (b"[1]\n", "invalid_request"),
    "no custom_id": (as_lines({"url": CHAT, "body": {}}), "invalid_request"),
    "a long custom_id": (as_lines(request("x" * (LONGEST_ID + 1))), "invalid_request"),
    "another method": (as_lines(request("x") | {"method": "GET"}), "invalid_request"),
    "another url": (as_lines(request("x", "/flush_cache")), "invalid_url"),
    "a url that is none": (as_lines(request("x") | {"url": [1]}), "invalid_url"),
    "no body": (as_lines(request("x") | {"body": "y"}), "invalid_request"),
    "a stream": (as_lines(request("x", stream=True)), "invalid_request"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_are_faults_of_their_own(name):
    raw, code = HOSTILE[name]
    fault, entry = entries(BytesIO(raw + as_lines(request("good"))), 2**20, URLS, Done())
    assert (fault.code, fault.line) == (code, 1)
    assert len(fault.message) < 400
    assert (entry.custom_id, entry.line) == ("good", 2)


def test_a_long_line_is_not_held(tmp_path):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as f:
        for _ in range(100):
            f.write(b"x" * 2**20)
        f.write(b"\n" + as_lines(request("good")))
    tracemalloc.start()
    try:
        with open_input(str(path)) as stream:
            fault, entry = entries(stream, 10 * 2**20, URLS, Done())
        assert tracemalloc.get_traced_memory()[1] < 25 * 2**20
    finally:
        tracemalloc.stop()
    assert (fault.code, entry.line) == ("line_too_long", 2)


def test_the_second_of_a_name_is_a_fault():
    first, second = entries(BytesIO(as_lines(request("a"), request("a"))), 2**20, URLS, Done())
    assert isinstance(first, Entry)
    assert (second.code, second.custom_id) == ("duplicate_custom_id", "a")


# The output.


def test_an_output_goes_on_where_it_was_cut_off(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(str(path)) as output:
        output.write("a", {"status_code": 200, "body": {}}, None)
        output.write("b", None, {"code": "duplicate_custom_id", "message": "", "line": 3})
    whole = path.read_bytes()
    for cut in (0, 1, 30):
        path.write_bytes(whole + whole[:cut])
        with Output(str(path)) as output:
            assert (output.done.ids, output.done.lines) == ({"a"}, {3})
            assert path.read_bytes() == whole
    # The answer of b is still to come: only its other line is done.
    left = list(entries(BytesIO(as_lines(request("a"), request("b"), request("b"))), 2**20, URLS, output.done))
    assert [(type(e), e.custom_id) for e in left] == [(Entry, "b")]
    assert Fault not in map(type, left)


@pytest.mark.parametrize("held", [b"notes", b"{}\n", b'{"id":"batch_req_1"}\n', b'{"id":"batch_req_1","error":3}\n'])
def test_another_file_is_left_alone(tmp_path, held, capsys):
    path, asked = tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    path.write_bytes(held)
    asked.write_bytes(as_lines(request("a")))
    assert batch.main(["-i", str(asked), "-o", str(path)]) == 2
    assert path.read_bytes() == held
    assert "give another -o" in one_line(capsys)


def one_line(capsys) -> str:
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_wrong_files_are_one_line(tmp_path, capsys):
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(as_lines(request("a")))
    for argv, message in (
        (["-i", str(tmp_path / "none"), "-o", "x"], "No such file"),
        (["-i", str(asked), "-o", str(tmp_path)], "Is a directory"),
        (["-i", str(asked)], "-o/--output-file"),
        (["-i", str(asked), "-o", str(tmp_path / "o"), "--concurrency", "0"], "1 or more"),
        (["-i", str(asked), "-o", str(tmp_path / "o"), "--port", "80"], "--port is about HTTP"),
        (["-i", str(asked), "-o", str(tmp_path / "o"), "--sparkle"], "unrecognized arguments: --sparkle"),
        # It is none of a batch's output.
        (["-i", str(asked), "-o", str(asked)], "give another -o"),
    ):
        assert batch.main(argv) == 2
        assert message in one_line(capsys)
    with Output(str(tmp_path / "locked")):
        assert batch.main(["-i", str(asked), "-o", str(tmp_path / "locked")]) == 2
        assert "another run writes to it" in one_line(capsys)


# Whole runs.


def test_a_batch_is_answered_as_the_library_does(tmp_path, capfd):
    asked, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(
        as_lines(
            request("chat"),
            b"\n{broken\n",
            request("text", "/v1/completions", prompt="def f(", max_tokens=9),
            request("response", "/v1/responses", input="def f(", max_output_tokens=9),
            request("unknown field", best_guess=1),
            request("chat"),
            request("\ud800", max_tokens=1),
        )
    )
    command = ["-i", str(asked), "-o", str(path), *SMALL]
    assert batch.main(command) == 0
    err = capfd.readouterr().err
    assert "4 answered, 3 errors, 0 done before" in err
    assert "line 6: 400: best_guess is not supported" in err
    found = {(a["custom_id"], a["error"] and a["error"]["line"]): a for a in answers(path)}
    llm = LLM(max_len=512, slots=1)
    body = found["chat", None]["response"]["body"]
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=12), block_size=1)[0]
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"] or "") + message["content"] == (expected.reasoning or "") + expected.text
    text = llm.generate(["def f("], SamplingParams(max_tokens=9), block_size=1)[0].text
    assert found["text", None]["response"]["body"]["choices"][0]["text"] == text
    assert found["response", None]["response"]["body"]["object"] == "response"
    assert found["\ud800", None]["response"]["status_code"] == 200
    refused = found["unknown field", None]["response"]
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "best_guess")
    assert found[None, 3]["error"]["code"] == "invalid_json"
    assert found["chat", 7]["error"]["code"] == "duplicate_custom_id"
    # Again, with an end that was cut off: only that is done.
    before = path.read_bytes()
    path.write_bytes(before[: before.rindex(b"\n", 0, -1) + 20])
    assert batch.main(command) == 0
    assert "6 done before" in capfd.readouterr().err
    assert sorted(map(len, answers(path))) == [4] * 7
    assert {(a["custom_id"], a["error"] and a["error"]["line"]) for a in answers(path)} == set(found)


@pytest.mark.parametrize(("text", "code"), [(b"{x\n[]\n", 1), (b"", 0)], ids=["no request", "no line"])
def test_a_file_without_a_valid_request_fails_and_an_empty_one_does_not(tmp_path, capfd, text, code):
    asked, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(text)
    assert batch.main(["-i", str(asked), "-o", str(path), *SMALL]) == code
    assert (f"{asked} has no valid request: 0 answered, 2 errors" in capfd.readouterr().err) == (code == 1)
    assert len(answers(path)) == 2 * code


def test_bodies_that_are_nested_up_to_pythons_limit(tmp_path, capfd):
    """Each line has its answer or error, however deep the stack is where it is read and sent."""
    asked, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    limit = sys.getrecursionlimit()
    deep = [b'{"a":' * n + b"1" + b"}" * n for n in range(limit - 100, limit, 4)]
    head = b'{"custom_id":"%d","url":"/v1/completions","body":{"prompt":"x","max_tokens":1,"metadata":'
    asked.write_bytes(b"".join(head % i + value + b"}}\n" for i, value in enumerate(deep)))
    assert batch.main(["-i", str(asked), "-o", str(path), *SMALL]) == 0
    codes = [a["error"]["code"] if a["error"] else a["response"]["status_code"] for a in answers(path)]
    assert len(codes) == len(deep)
    assert set(codes) <= {"invalid_json", 200, 400}
    assert "Traceback" not in capfd.readouterr().err


def started(*argv, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "dflash_jax", "batch", *argv, *SMALL, "--platform", "cpu"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def test_an_interrupt_loses_nothing(tmp_path):
    asked, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [str(i) for i in range(10_000)]
    asked.write_bytes(as_lines(*(request(name, max_tokens=60, ignore_eos=True) for name in names)))
    with started("-i", str(asked), "-o", str(path), "--concurrency", "2") as process:
        while not path.exists() or not path.stat().st_size:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        err = without_kernels_line(process.stderr.read().decode())
        assert process.wait() == 130
    assert err.startswith("interrupted (the same command goes on): ")
    assert err.count("\n") == 1
    done = [a["custom_id"] for a in answers(path)]
    assert 0 < len(done) < len(names)
    asked.write_bytes(as_lines(*(request(name, max_tokens=60, ignore_eos=True) for name in names[:20] + done)))
    assert batch.main(["-i", str(asked), "-o", str(path), *SMALL]) == 0
    after = [a["custom_id"] for a in answers(path) if a["error"] is None]
    assert sorted(after) == sorted({*names[:20], *done})
    assert len({json.dumps(a["response"]["body"]["choices"]) for a in answers(path) if a["error"] is None}) == 1


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt, ["workers"]), (EngineError, ["engine", "workers"])])
def test_an_interrupt_does_not_wait_for_the_engine_which_may_be_compiling(error, ended):
    calls = []
    engine = SimpleNamespace(stop=lambda: calls.append("engine"))
    host = SimpleNamespace(engine=engine, start_workers=lambda: None, set_ready=lambda: None, stop_workers=lambda: None)
    serving = SimpleNamespace(media=None, stop_workers=lambda: calls.append("workers"))
    with pytest.raises(error), batch.running(host, serving):
        raise error
    assert calls == ended


def test_batch_reads_and_writes_pipes_and_ends_when_they_close(tmp_path):
    """In and out through pipes; an output that is closed ends the run without a word."""
    given = as_lines(*(request(str(i), max_tokens=2) for i in range(8)))
    with started("-i", "-", "-o", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out, err = process.communicate(given)
    assert sorted(json.loads(line)["custom_id"] for line in out.splitlines()) == [str(i) for i in range(8)]
    assert b"8 answered" in err
    reader, writer = os.pipe()
    os.close(reader)
    with started("-i", "-", "-o", "-", stdin=subprocess.PIPE, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate(given)
    assert (process.returncode, without_kernels_line(err.decode())) == (141, "")


def test_a_full_disk_ends_a_batch_in_one_line(tmp_path, capfd):
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(as_lines(*(request(str(i), max_tokens=2) for i in range(8))))
    assert batch.main(["-i", str(asked), "-o", "/dev/full", *SMALL]) == 2
    assert without_kernels_line(capfd.readouterr().err) == "error: /dev/full: No space left on device\n"
