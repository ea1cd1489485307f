"""What is asked beside text, and what acts on the engine: information, loads, flush, abort, probe, render, CORS."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from dflash_jax import SamplingParams
from dflash_jax.errors import InputError
from dflash_jax.options.serve import parse
from dflash_jax.server.cors import Cors, of_arguments
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, NAME, OFF, Running, alone, hosted, started

LONG = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "stream": True}
# Rounds with masks are dispatched one by one: such an answer is not over before the next request.
SLOW = {"min_tokens": 900}


class Streaming:
    """A request whose answer is read on a thread; `id` is there with its first event, `events` at its end."""

    def __init__(self, server, key=None, **body):
        self.id, self.events, self._begun = None, [], threading.Event()
        self._url, self._body = f"{server.url}/v1/completions", LONG | body
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.id = self.events[0]["id"]
                    self._begun.set()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def reasons(self) -> list[str]:
        self._thread.join(60)
        choices = [c for event in self.events for c in event.get("choices", [])]
        return [c["finish_reason"] for c in choices if c["finish_reason"]]


# Information.


def test_the_model_is_described(quiet):
    info = quiet.http.get("/model_info").json()
    assert info == quiet.http.get("/get_model_info").json()
    assert (info["model_path"], info["served_model_name"], info["is_generation"]) == ("bundled", NAME, True)
    assert (info["model_type"], info["weight_version"], info["max_model_len"]) == ("qwen3_5_moe_text", "default", 1024)
    assert quiet.http.get("/server_info").json()["served_model_name"] == NAME


def test_the_tokenizer_is_described_without_paths(quiet, llm):
    info = quiet.http.get("/tokenizer_info").json()
    assert info["chat_template"] == llm.tokenizer.chat_template
    assert info["eos_token"] == llm.tokenizer.config["eos_token"]
    assert info["tokenizer_class"] == llm.tokenizer.config["tokenizer_class"]
    assert str(llm.directory) not in json.dumps(info)
    llm.tokenizer.config["token"] = "hf_secret"
    try:
        assert "hf_secret" not in quiet.http.get("/tokenizer_info").text
    finally:
        del llm.tokenizer.config["token"]


def test_loads_count_what_is_under_way(quiet):
    def loads():
        """The three loads of one moment: requests that end between two of them change the first one read again."""
        while True:
            load, old, new, again = (
                quiet.http.get(path).json() for path in ("/load", "/get_load", "/v1/loads", "/load")
            )
            if load == again:
                return load, old, new["loads"][0]

    assert loads()[0] == {"server_load": 0}
    streams = [Streaming(quiet, **SLOW) for _ in range(4)]
    # Every slot is taken: one more waits.
    waiting = threading.Thread(target=quiet.post, args=["/v1/completions"], kwargs={"prompt": "x", "max_tokens": 1})
    waiting.start()
    while quiet.host.engine.engine.waiting == 0 and not streams[0].is_over:
        time.sleep(0.005)
    load, old, new = loads()
    assert 0 < load["server_load"] <= 5
    assert old[0]["num_reqs"] == new["num_running_reqs"] + new["num_waiting_reqs"]
    assert new["num_used_tokens"] > 0
    quiet.post("/abort_request", abort_all=True)
    waiting.join(60)
    assert all(s.reasons() for s in streams)


def test_ping_answers_and_docs_page_loads_nothing_external(quiet):
    assert quiet.http.get("/ping").status_code == quiet.http.post("/ping").status_code == 200
    page = quiet.http.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    texts = page.text + quiet.http.get("/docs.js").text
    # Nothing of elsewhere.
    assert "//cdn" not in texts
    assert "http:" not in texts
    assert "https:" not in texts


def test_default_is_a_name_of_the_model(quiet, llm):
    expected = alone(llm, thinking=False, max_tokens=8)
    found = quiet.post(
        "/v1/chat/completions", model="default", messages=MESSAGES, max_tokens=8, chat_template_kwargs=OFF
    )
    assert found.json()["choices"][0]["message"]["content"] == expected.text
    assert quiet.post("/tokenize", model="default", prompt="x").status_code == 200
    assert quiet.http.get("/v1/models/default").status_code == 200


# Flush.


def shared(server) -> tuple[int, int]:
    """Prompt tokens of a conversation, and how many of them are computed anew."""
    usage = server.chat(max_tokens=1)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
def test_a_flush_forgets_prefixes(quiet, method, path):
    prompt, _ = shared(quiet)
    # The last token is always computed: its logits give the next one.
    assert shared(quiet) == (prompt, 1)
    assert quiet.idle()
    found = quiet.http.request(method, path)
    assert (found.status_code, found.json()["success"]) == (200, True)
    assert len(quiet.host.engine.engine.prefix_cache) == 0
    assert shared(quiet) == (prompt, prompt)


def test_what_is_under_way_keeps_its_text_through_a_flush(quiet, llm):
    expected = llm.generate(["def f("], SamplingParams(max_tokens=900, ignore_eos=True), block_size=1)[0].text
    stream = Streaming(quiet, temperature=0)
    refused = quiet.http.get("/flush_cache")
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert quiet.post("/reset_prefix_cache").json()["success"]
    assert stream.reasons() == ["length"]
    assert "".join(e["choices"][0]["text"] for e in stream.events) == expected


# Abort.


def test_an_abort_ends_one_request_with_all_its_choices(quiet):
    stays, goes = Streaming(quiet, n=1, **SLOW), Streaming(quiet, n=2, **SLOW)
    found = quiet.post("/abort_request", rid=goes.id)
    assert found.status_code == 200
    assert goes.reasons() == ["abort", "abort"]
    assert quiet.post("/abort_request", rid=stays.id).status_code == 200
    assert stays.reasons() == ["abort"]


def test_aborts_by_a_clients_own_id(quiet):
    body = {"sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "text": "def f(", "rid": "mine"}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(quiet.post("/generate", **body).json()))
    thread.start()
    while quiet.host.engine.engine.running == 0:
        time.sleep(0.005)
    # A prefix of the id is another id.
    assert quiet.post("/abort_request", rid="min").status_code == 200
    assert quiet.post("/abort_request", rid="mine").status_code == 200
    thread.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers[0]["meta_info"]["completion_tokens"] < 900


def test_an_abort_names_what_it_wants(quiet):
    assert quiet.post("/abort_request").status_code == 400
    assert quiet.post("/abort_request", rid="").status_code == 400
    assert quiet.post("/abort_request", rid="unknown").status_code == 200
    assert quiet.post("/abort_request", rid="x", finished_reason={}).status_code == 400


def test_owners_abort_their_own_requests_only(quiet):
    """As the gate tells them apart: by the API key."""
    stream = Streaming(quiet)
    for wanted in ({"rid": stream.id}, {"abort_all": True}):
        other = quiet.http.post("/abort_request", json=wanted, headers={"x-api-key": "another"})
        assert other.status_code == 200
    assert quiet.post("/abort_request", abort_all=True).status_code == 200
    assert stream.reasons() == ["abort"]


# The probe.


def test_health_generate_makes_a_token(quiet):
    made = quiet.host.engine.engine.statistics.new_tokens
    assert quiet.http.get("/health_generate").json() == {"status": "ok"}
    assert quiet.host.engine.engine.statistics.new_tokens == made + 1


def test_a_full_engine_is_well(quiet):
    """The probe needs no slot where others' tokens come."""
    streams = [Streaming(quiet) for _ in range(4)]
    assert quiet.http.get("/health_generate").status_code == 200
    quiet.post("/abort_request", abort_all=True)
    assert all(s.reasons() for s in streams)


def test_an_engine_that_makes_no_token_is_not_well(llm, quiet, monkeypatch):
    """Its thread lives, and takes no request: many ask at once, and one request waits."""
    monkeypatch.setattr("dflash_jax.server.engine_host.TOKEN_S", 0.2)
    engine = started(llm, prepared=False)
    submitted = []
    engine.engine.submit = lambda request, **_: submitted.append(request)
    host = hosted(llm, engine)
    serving = Serving(llm, in_process(host), ["tiny"])
    running = Running(serving, host)
    try:

        async def ask():
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
                return await asyncio.gather(*(http.get("/health_generate") for _ in range(8)))

        found = asyncio.run(ask())
        assert {f.status_code for f in found} == {503}
        assert "no token came" in found[0].json()["status"]
        assert running.http.get("/health").status_code == 200
        host.is_ready = False
        host.tell_state()
        assert running.http.get("/health_generate").json()["status"] == "warming up"
    finally:
        running.stop()
        engine.stop()


def test_callers_of_the_probe_share_its_token(quiet):
    made = quiet.host.engine.engine.statistics.new_tokens

    host = EngineHost(quiet.serving.llm, quiet.host.engine, "tiny")

    async def ask():
        return await asyncio.gather(*(host.answer("generate") for _ in range(50)))

    assert asyncio.run(ask()) == [None] * 50
    assert quiet.host.engine.engine.statistics.new_tokens == made + 1


# Render, and SageMaker's endpoint.


def test_render_is_what_would_be_generated_from(quiet, llm):
    body = {"messages": MESSAGES, "max_tokens": 7, "temperature": 0.5, "seed": 3, "guided_choice": ["a", "b"]}
    found = quiet.post("/v1/chat/completions/render", **body).json()
    assert found["token_ids"] == llm.encode_chat(MESSAGES)
    params = found["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["seed"]) == (7, 0.5, 3)
    several = quiet.post("/v1/completions/render", prompt=["def f(", "import os"], n=2).json()
    assert [r["token_ids"] for r in several] == [llm.encode("def f("), llm.encode("import os")]
    refused = quiet.post("/v1/chat/completions/render", messages=MESSAGES, guided_json={"type": "nothing"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": MESSAGES, "max_tokens": 6, "chat_template_kwargs": OFF}, "/v1/chat/completions"),
        ({"prompt": "def f(", "max_tokens": 6}, "/v1/completions"),
        ({"text": "def f(", "sampling_params": {"max_new_tokens": 6}}, "/generate"),
        ({"input": "def f(", "max_output_tokens": 6}, "/v1/responses"),
    ],
)
def test_invocations_are_any_interface(quiet, body, path):
    def text(found) -> str:
        value = found.json()
        return json.dumps(value.get("choices") or value.get("output") or value["text"])

    one, other = (quiet.post(p, **body) for p in ("/invocations", path))
    assert one.status_code == other.status_code == 200
    if path != "/v1/responses":
        assert text(one) == text(other)


def test_invocations_of_no_interface(quiet):
    for body, param in (({"x": 1}, None), ({"messages": MESSAGES, "best_guess": 1}, "best_guess"), ([1], None)):
        found = quiet.http.post("/invocations", json=body)
        assert found.status_code == 400
        assert found.json()["error"]["param"] in (param, "body")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": {}}, "prompt"),
        ({"text": "x", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
    ],
)
def test_invocations_name_what_is_wrong(quiet, body, param):
    """As the interface itself does."""
    path = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "text": "/generate"}[next(iter(body))]
    found = [quiet.post(where, **body) for where in ("/invocations", path)]
    assert [each.status_code for each in found] == [400, 400]
    assert found[0].json() == found[1].json()
    assert found[0].json()["error"]["param"] == param


# CORS.

PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_other_origins_are_let_in_by_name_only(llm, quiet):
    assert "access-control-allow-origin" not in quiet.http.get("/health", headers=PREFLIGHT).headers
    serving = Serving(llm, in_process(quiet.host), ["tiny"])
    running = Running(serving, quiet.host, "secret", cors=Cors(("https://app.example",)))
    try:
        # A preflight carries no key.
        asked = running.http.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        other = running.http.options("/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        body = {"prompt": "x", "max_tokens": 1}
        sent = {"Origin": "https://app.example"}
        refused = running.http.post("/v1/completions", json=body, headers=sent)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
        found = running.http.post("/v1/completions", json=body, headers=sent | {"Authorization": "Bearer secret"})
        assert found.status_code == 200
    finally:
        running.stop()


def test_origins_of_the_command_line():
    def cors(*argv):
        return of_arguments(parse(list(argv))[0])

    assert cors() is None
    assert cors("--allowed-origins", "https://a.example", "http://b:80").origins == ("https://a.example", "http://b:80")
    assert cors("--allowed-origins", '["*"]', "--allowed-methods", '["GET"]').methods == ("GET",)
    named = cors("--allowed-origins", "https://a.example", "--allow-credentials")
    assert (named.credentials, named.headers) == (True, ("*",))
    for argv, message in (
        (["--allowed-origins", "a.example"], "'a.example'.*scheme"),
        (["--allowed-origins", "https://a.example/"], "without a path"),
        (["--allowed-origins", "[1]"], "JSON list of strings"),
        (["--allowed-origins", "["], "JSON list of strings"),
        (["--allowed-origins", "*", "--allow-credentials"], "name the origins"),
        (["--allowed-methods", "GET"], "--allowed-origins"),
    ):
        with pytest.raises(InputError, match=message):
            cors(*argv)
