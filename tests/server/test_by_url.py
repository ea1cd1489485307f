"""`dflash batch --urls` and `dflash train regenerate --urls` on two addresses, of which one dies in the middle."""

import asyncio
import json
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from dflash_jax.cli import batch, train
from dflash_jax.errors import InputError
from dflash_jax.frontend import servers
from dflash_jax.options.train import TrainConfig
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.training import regenerate as regeneration
from dflash_jax.training.regenerate import regenerate
from dflash_jax.training.remote import RemoteTarget
from tests.server.conftest import NAME, wait_until
from tests.streams import StreamServer

TALKS = [
    {"messages": [{"role": "user", "content": f"Write `f{i}`."}, {"role": "user", "content": "Again."}]}
    for i in range(5)
]
LINES = [*TALKS, {"text": "def f("}, {"prompt": "import"}]


class Dying:
    """A second address of a server, which dies as a POST request comes in.

    Attributes:
        url: The address.
        is_dead: Whether it has died, with all of its connections.
    """

    def __init__(self, url: str, posts: int):
        self._port, self._left, self.is_dead = int(url.rpartition(":")[2]), posts, False
        address: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(address)))
        self._thread.start()
        self.url = address.result()

    async def _serve(self, address):
        self._loop, self._is_stopped = asyncio.get_running_loop(), asyncio.Event()
        async with StreamServer(self._relay) as self._server:
            address.set_result(f"http://127.0.0.1:{self._server.port}")
            await self._is_stopped.wait()

    async def _relay(self, reader, writer):
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._copy(reader, to_writer), self._copy(to_reader, writer))
        except ConnectionError:
            writer.transport.abort()
        finally:
            to_writer.transport.abort()

    async def _copy(self, reader, writer):
        while data := await reader.read(2**16):
            self._left -= data.count(b"POST /v1/completions ")
            if self._left <= 0:
                self.is_dead = True
                self._server.close()
            writer.write(data)
        raise ConnectionError

    def stop(self):
        self._loop.call_soon_threadsafe(self._is_stopped.set)
        self._thread.join()


@pytest.fixture
def dying(quiet, monkeypatch):
    """The server's second address, which dies at its third request for tokens."""
    monkeypatch.setattr(servers, "LOOK_S", 0.05)
    dying = Dying(quiet.url, 3)
    yield dying
    dying.stop()


def as_file(path, values) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def requests(count: int) -> list[dict]:
    bodies = [{"prompt": "def f(", "max_tokens": 12, "seed": i, "temperature": 0.8} for i in range(count)]
    return [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_loses_nothing_with_a_server_and_goes_on_where_it_ended(quiet, dying, tmp_path, capsys):
    given = requests(12)
    asked, path = (
        as_file(tmp_path / "in.jsonl", [*given, {"custom_id": "x", "url": "/flush_cache"}]),
        tmp_path / "out.jsonl",
    )
    command = ["-i", asked, "-o", str(path), "--urls", quiet.url, f"{dying.url}/v1", "--concurrency", "2"]
    assert batch.main(command) == 0
    assert dying.is_dead
    assert "12 answered, 1 errors, 0 done before" in capsys.readouterr().err
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in read(path) if a["response"]}
    alone = {r["custom_id"]: quiet.post(r["url"], **r["body"]).json()["choices"][0]["text"] for r in given}
    assert texts == alone
    assert len(read(path)) == 13
    # A second run, with what was cut off, on the server that is left.
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:30])
    assert batch.main(command) == 0
    assert "9 answered" in capsys.readouterr().err.replace("8 answered, 1 errors", "9 answered")
    assert {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in read(path) if a["response"]} == alone


def test_a_batch_by_url_takes_no_options_of_a_server(quiet, tmp_path, capsys, monkeypatch):
    asked, out = as_file(tmp_path / "in.jsonl", requests(1)), str(tmp_path / "out.jsonl")
    for words, message in (
        (["--urls", quiet.url, "--slots", "4"], "--slots is of a server"),
        (["--urls", quiet.url, "--concurrency", "0"], "1 or more"),
        (["--urls", "here"], "it must be like"),
        (["--urls", "http://127.0.0.1:1"], "no server answers: http://127.0.0.1:1: ConnectError"),
        (["--api-key", "k"], "--api-key is of --urls"),
    ):
        assert batch.main(["-i", asked, "-o", out, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_page_of_a_proxy_is_an_error_of_its_line():
    import httpx

    for response, error in (
        (httpx.Response(404, text="<html>no</html>"), "the answer is not JSON: '<html>no</html>'"),
        (httpx.Response(422, json={"detail": [1]}), '{"detail": [1]}'),
        (httpx.Response(400, json=["x"]), '["x"]'),
        (httpx.Response(400, json={"error": {"message": "no"}}), "no"),
    ):
        answer = batch.Response.of(response)
        assert (answer.error, answer.tokens, answer.request_id) == (error, 0, None)


def test_regenerate_by_url_writes_what_it_writes_here(quiet, dying, llm, tmp_path, monkeypatch, capsys):
    """And goes on with what either has begun."""
    monkeypatch.setattr(regeneration, "GROUP", 3)
    monkeypatch.setattr(regeneration, "TURNS", 0)
    data = as_file(tmp_path / "d.jsonl", LINES)
    config = TrainConfig(data=(data,), target="t", max_new_tokens=10, temperature=0.8, thinking=False, slots=2)
    here, there = tmp_path / "here.jsonl", tmp_path / "run" / "regenerated.jsonl"
    assert regenerate(config, llm, here, print) == len(LINES)
    words = ["regenerate", "--data", data, "--target", "t", "--max-new-tokens", "10", "--temperature", "0.8"]
    words += ["--no-thinking", "--slots", "2", "--output", str(tmp_path / "run"), "--urls", quiet.url, dying.url]
    assert train.main(words) == 0
    assert dying.is_dead
    assert there.read_text() == here.read_text()
    errors = capsys.readouterr().err
    assert f"2 servers answer with {NAME}" in errors
    assert f"warning: --target is t, and --urls serve {NAME}" in errors
    # Three prompts of the other run, and the others here.
    record = json.loads(here.with_suffix(".json").read_text())
    kept = "".join(line for line in here.read_text().splitlines(keepends=True) if json.loads(line)["source"] < 3)
    here.with_suffix(".json").write_text(json.dumps(record | {"done": 3, "bytes": len(kept.encode())}))
    with RemoteTarget([quiet.url], 2) as target:
        assert regenerate(config, target, here, print) == len(LINES)
    assert here.read_text() == there.read_text()


def test_a_prompt_has_its_max_tokens_and_waits_for_a_place():
    """256, the default here, is not that of the endpoint; and a prompt that waits has no task."""
    import httpx

    bodies, tasks = [], []

    class Recorder:
        async def post(self, path, content):
            bodies.append(json.loads(content))
            tasks.append(len(asyncio.all_tasks()))
            number = bodies[-1]["prompt"][0]
            await asyncio.sleep(0)
            return httpx.Response(200, json={"choices": [{"token_ids": [number], "text": str(number)}]})

    target = RemoteTarget(["http://a"], 3)
    target.model, target._servers = "m", Recorder()
    params = [SamplingParams(max_tokens=256 if number % 2 else None) for number in range(9)]
    answers = asyncio.run(target._generate([[number] for number in range(9)], params))
    assert [answer.token_ids for answer in answers] == [[number] for number in range(9)]
    fixed = {"model": "m", "return_token_ids": True}
    assert sorted(bodies, key=lambda body: body["prompt"]) == [
        {"prompt": [number], "max_tokens": each.max_tokens, **fixed} for number, each in enumerate(params)
    ]
    # The prompts', and the one that waits for them.
    assert max(tasks) == 3 + 1


def test_what_servers_do_not_answer_is_reported(quiet, tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    values = [{"messages": [{"role": "user", "content": [image]}]}, {"text": "x"}]
    config = TrainConfig(data=(as_file(tmp_path / "d.jsonl", values),), max_new_tokens=4, temperature=0.0)
    with RemoteTarget([quiet.url], 2) as target:
        with pytest.raises(InputError, match="are not sent to --urls"):
            regenerate(config, target, tmp_path / "r.jsonl", print)
        said = []
        assert regenerate(replace(config, skip_bad_lines=True), target, tmp_path / "r.jsonl", said.append) == 1
        assert "1 lines left out" in said[0]
        with pytest.raises(InputError, match=r"/tokenize: 400: "):
            target.encode_chat([{"role": "unknown", "content": 3}])
    with pytest.raises(InputError, match="no server answers"):
        RemoteTarget(["http://127.0.0.1:1"], 2).__enter__()
    assert wait_until(quiet.idle)
