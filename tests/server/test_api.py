"""Other interfaces than chat: completions, responses, SGLang's, metrics, and the README's commands."""

import itertools
import json
import re
import subprocess
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax import SamplingParams
from dflash_jax.server import responses
from dflash_jax.server.conversation import Delta
from dflash_jax.server.limits import Additions
from dflash_jax.server.responses import Output
from dflash_jax.server.responses_input import Tools
from dflash_jax.server.serving import Serving
from dflash_jax.server.tools import CallDelta
from tests.server.conftest import MESSAGES, NAME, OFF, SCHEMA, TOOL, alone, programs_of

# Completions.


def test_completions_give_what_the_library_gives(client, llm):
    expected = llm.generate(["def f(", "import os"], SamplingParams(max_tokens=12), block_size=1)
    found = client.completions.create(model="tiny", prompt=["def f(", "import os"], max_tokens=12)
    assert [c.text for c in found.choices] == [c.text for c in expected]
    ids = client.completions.create(model="tiny", prompt=llm.encode("def f("), max_tokens=12)
    assert ids.choices[0].text == expected[0].text
    pieces = client.completions.create(model="tiny", prompt="def f(", max_tokens=12, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == expected[0].text


def test_echo_and_the_prompts_log_probabilities(client, llm):
    """Against log-probabilities that decoding gave: the prompt's second half was generated from its first."""
    first = llm.encode("class Parser:\n    def ")
    made = llm.generate([first], SamplingParams(max_tokens=80, logprobs=3))[0]
    prompt = [*first, *made.token_ids]
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, echo=True, logprobs=3).choices[0]
    logprobs = found.logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(prompt) + 1
    expected = [entry["logprob"] for entry in made.logprobs]
    assert logprobs.token_logprobs[len(first) : -1] == pytest.approx(expected, abs=1e-4)
    assert found.text.startswith(llm.tokenizer.decode(prompt))
    assert all(len(top) in (2, 3, 4) for top in logprobs.top_logprobs[1:])
    none = client.completions.create(model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert none.text == llm.tokenizer.decode(prompt)
    assert none.logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:-1], abs=1e-4)
    also = client.completions.create(model="tiny", prompt=prompt[:9], max_tokens=1, extra_body={"prompt_logprobs": 1})
    listed = also.choices[0].prompt_logprobs
    assert [listed[i][str(prompt[i])]["logprob"] for i in range(1, 9)] == pytest.approx(
        logprobs.token_logprobs[1:9], abs=1e-4
    )


# Responses.


def test_responses_give_what_the_library_gives(client, llm):
    expected = alone(llm, max_tokens=60)
    thought, _, answer = expected.text.partition("</think>")
    options = {"model": NAME, "input": MESSAGES[0]["content"], "max_output_tokens": 60}
    found = client.responses.create(**options, temperature=0)
    assert found.output_text == answer.lstrip()
    kinds = [item.type for item in found.output]
    assert kinds == ["reasoning", "message"] if answer.strip() else ["reasoning"]
    assert found.output[0].content[0].text == thought.strip()
    assert found.usage.output_tokens == len(expected.token_ids)
    assert found.status == ("completed" if expected.finish_reason == "stop" else "incomplete")
    names, text, last = [], "", None
    for number, event in enumerate(client.responses.create(**options, temperature=0, stream=True)):
        assert event.sequence_number == number
        names.append(event.type)
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == f"response.{found.status}"
    assert text == found.output_text
    assert [i.type for i in last.response.output] == kinds


@pytest.mark.parametrize("name", ["final_value", "stored_response"])
def test_an_error_after_the_first_event_of_a_response_is_its_last_event(quiet, monkeypatch, name):
    """Wherever it comes from, it has its number in the stream."""

    def broken(*_):
        raise ValueError("broken")

    monkeypatch.setattr(responses, name, broken)
    body = {"model": NAME, "input": "Say.", "max_output_tokens": 4}
    lines = quiet.post("/v1/responses", **body, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "internal error: ValueError"
    whole = quiet.post("/v1/responses", **body)
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, "internal error: ValueError")


def test_responses_call_tools_and_keep_to_schemas(client):
    tool = {"type": "function", **TOOL["function"]}
    options = {"model": NAME, "input": "Read it.", "tools": [tool], "tool_choice": "required", "max_output_tokens": 400}
    found = client.responses.create(**options, parallel_tool_calls=False, reasoning={"effort": "none"})
    (call,) = found.output
    assert (call.type, call.name, call.status) == ("function_call", "read_file", "completed")
    assert "path" in json.loads(call.arguments)
    again = client.responses.create(
        model=NAME,
        input=[
            {"role": "user", "content": "Read it."},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "x"},
        ],
        max_output_tokens=8,
    )
    # Eight tokens do not end the thought.
    assert [(item.type, item.status) for item in again.output] == [("reasoning", "incomplete")]
    assert again.usage.output_tokens == 8
    formed = client.responses.create(
        model=NAME,
        input="Say.",
        max_output_tokens=80,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )
    assert set(json.loads(formed.output_text)) == {"kind", "n"}


def test_a_call_that_ends_in_one_piece_with_more_text():
    """Its arguments belong to it, and the text is a message of its own."""
    output = Output(None, Tools())
    output.take(Delta("", "", [CallDelta(0, "", "call_1", "f"), CallDelta(0, '{"x"')]))
    output.take(Delta("", "Here.", [CallDelta(0, ": 1}")]))
    output.close()
    assert [i["type"] for i in output.items] == ["function_call", "message"]
    assert output.items[0]["arguments"] == '{"x": 1}'


# SGLang.


def test_sglangs_generate_gives_what_the_library_gives(quiet, llm):
    expected = llm.generate(["def f("], SamplingParams(max_tokens=24), block_size=1)[0]
    body = {"text": "def f(", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    found = quiet.post("/generate", **body, block_size=16).json()
    assert found["text"] == expected.text
    assert found["output_ids"] == expected.token_ids
    meta = found["meta_info"]
    assert meta["completion_tokens"] == 24
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert meta["spec_accept_length"] == pytest.approx(24 / meta["spec_verify_ct"])
    histogram, accepted = meta["spec_correct_drafts_histogram"], meta["spec_num_correct_drafts"]
    assert (sum(histogram), accepted) == (meta["spec_verify_ct"], 24 - meta["spec_verify_ct"])
    assert sum(i * count for i, count in enumerate(histogram)) == accepted
    assert meta["spec_accept_rate"] == accepted / meta["spec_num_proposed_drafts"]
    older = [meta[f"spec_{name}"] for name in ("accept_token_num", "draft_token_num", "accept_histogram")]
    assert older == [accepted, meta["spec_num_proposed_drafts"], histogram]
    several = quiet.post("/generate", text=["def f(", "import os"], sampling_params=body["sampling_params"]).json()
    assert [len(f["output_ids"]) for f in several] == [24, 24]
    with quiet.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        events = [line[6:] for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["text"] == expected.text
    scored = quiet.post("/generate", **body, return_logprob=True, logprob_start_len=0, top_logprobs_num=2).json()
    assert len(scored["meta_info"]["input_token_logprobs"]) == meta["prompt_tokens"]
    assert len(scored["meta_info"]["output_token_logprobs"]) == 24


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_of_generate_has_each_logprob_once(stepwise, monkeypatch, incremental):
    """Text and tokens so far, as SGLang's, or what is new; no log-probability comes twice in either."""
    monkeypatch.setattr(stepwise.serving, "additions", Additions(incremental=incremental))
    body = {"text": "def f(x):", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    expected = stepwise.post("/generate", **body).json()
    with stepwise.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert len(events) > 1
    names = [f"{side}_{kind}_logprobs" for side in ("output", "input") for kind in ("token", "top")]
    for name in names:
        parts = [event["meta_info"][name] for event in events]
        # Their last bits depend on the batch.
        found, whole = [entry for part in parts for entry in part], expected["meta_info"][name]
        assert len(found) == len(whole)
        assert "top" in name or [entry[1] for entry in found] == [entry[1] for entry in whole]
        holders = {i for i, part in enumerate(parts) if part}
        if not incremental:
            assert holders == {len(events) - 1}
        else:
            assert holders == ({0} if name.startswith("input") else set(range(len(events))))
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    texts, ids = [event["text"] for event in events], [event["output_ids"] for event in events]
    if incremental:
        assert ("".join(texts), list(itertools.chain(*ids))) == (expected["text"], expected["output_ids"])
    else:
        assert (texts[-1], ids[-1]) == (expected["text"], expected["output_ids"])
        assert all(expected["text"].startswith(text) for text in texts)
        assert [len(each) for each in ids] == counts
    assert counts == sorted(counts)
    assert counts[-1] == 60


@pytest.mark.parametrize("stop", [[], [5]])
def test_generate_reads_a_prompt_alone(quiet, stop):
    """max_new_tokens 0: what SGLang's clients score prompts with."""
    text = "def f(x):\n    return x"
    sampling = {"max_new_tokens": 0, "temperature": 0, "stop_token_ids": stop}
    body = {"text": text, "return_logprob": True, "logprob_start_len": 0}
    found = quiet.post("/generate", **body, sampling_params=sampling).json()
    longer = quiet.post("/generate", **body, sampling_params=sampling | {"max_new_tokens": 1}).json()["meta_info"]
    meta = found["meta_info"]
    assert (found["text"], found["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == []
    assert meta["input_token_logprobs"] == longer["input_token_logprobs"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    beside = [sampling, {"max_new_tokens": 2}]
    several = quiet.post("/generate", text=["def f(", "def f("], sampling_params=beside, stream=True)
    events = [json.loads(line[6:]) for line in several.text.splitlines() if line.startswith("data: {")]
    last = {event["index"]: len(event["output_ids"]) for event in events}
    assert last == {0: 0, 1: 2}


def test_a_stream_ends_once_however_far_ahead_the_engine_is(stepwise, monkeypatch):
    """The client reads when all is long done."""
    real, answers = Serving.pieces, []

    async def late(self, row):
        events = [piece async for piece in real(self, row)]
        for piece in events:
            yield piece

    monkeypatch.setattr(Serving, "pieces", late)
    body = {"prompt": "def f(", "max_tokens": 200, "ignore_eos": True, "stream": True}
    for path in ("/v1/completions", "/v1/chat/completions"):
        asked = body if path == "/v1/completions" else {**body, "messages": MESSAGES}
        if path != "/v1/completions":
            del asked["prompt"]
        with stepwise.http.stream("POST", path, json=asked) as response:
            lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for line in lines for choice in line["choices"]]
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])
        answers.append(len(reasons))
    assert min(answers) > 1


def test_a_stop_token_is_no_part_of_the_text(client, llm):
    plain = llm.generate(["def f("], SamplingParams(max_tokens=20), block_size=1)[0]
    token = plain.token_ids[7]
    upto = plain.token_ids.index(token)
    found = client.completions.create(
        model="tiny", prompt="def f(", max_tokens=20, extra_body={"stop_token_ids": [token]}
    )
    assert found.choices[0].text == llm.tokenizer.decode(plain.token_ids[:upto])
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == upto + 1


# What is asked beside text.


def test_what_is_asked_beside_text(quiet, llm):
    http = quiet.http
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == [NAME, "tiny"]
    assert http.get(f"/v1/models/{NAME}").json()["max_model_len"] == 1024
    assert http.get("/v1/models/other").status_code == 404
    assert [http.get(p).status_code for p in ("/health", "/ready", "/version", "/", "/app.js")] == [200] * 5
    ids = llm.encode("def f(x):")
    tokens = quiet.post("/tokenize", prompt="def f(x):", return_token_strs=True).json()
    assert (tokens["tokens"], tokens["count"], len(tokens["token_strs"])) == (ids, len(ids), len(ids))
    assert quiet.post("/tokenize", messages=MESSAGES).json()["tokens"] == llm.encode_chat(MESSAGES)
    assert quiet.post("/detokenize", tokens=ids).json()["prompt"] == "def f(x):"
    info = http.get("/server_info").json()
    assert info["model_path"] == "bundled"
    ended = info["internal_states"][0]["requests"].get("length", 0)
    quiet.post("/v1/completions", prompt="x", max_tokens=1)
    assert http.get("/server_info").json()["internal_states"][0]["requests"]["length"] == ended + 1


def counters(server) -> Counter:
    """The samples, without the labels of the server, by name and the values of their other labels."""
    found = Counter()
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            others = [v for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")]
            found[sample.name, *others] = sample.value
    return found


def test_metrics_count_what_the_answers_say(quiet):
    """Of every interface, of streams and of several choices."""
    before, body = counters(quiet), {"max_tokens": 40, "temperature": 0.6, "block_size": 16}
    chats = [quiet.chat(**body, seed=i)["usage"] for i in range(3)]
    chats.append(quiet.chat(**body, seed=3, n=3)["usage"])
    stream = body | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    lines = quiet.post("/v1/chat/completions", messages=MESSAGES, **stream).text.splitlines()
    chats.append(json.loads([line for line in lines if line][-2][6:])["usage"])
    chats.append(quiet.post("/v1/completions", prompt=["def f(", "import os"], **body).json()["usage"])
    response = quiet.post("/v1/responses", input="def f(", max_output_tokens=40).json()["usage"]
    message = quiet.post("/v1/messages", messages=MESSAGES, max_tokens=40).json()["usage"]
    native = quiet.post("/generate", text="def f(", sampling_params={"max_new_tokens": 40}).json()["meta_info"]
    grown = counters(quiet) - before
    of = [usage["drafters"]["bundled"] for usage in (*chats, response, message, native)]
    for usage, each in zip(chats, of, strict=False):
        details = usage["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        assert each["rounds"] == details["draft_rounds"]
        assert sum(each["accepted_per_pos"].values()) == accepted
        assert sum(each["drafted_per_pos"].values()) == accepted + details["rejected_prediction_tokens"]
    assert grown["vllm:spec_decode_num_drafts_total", "bundled"] == sum(each["rounds"] for each in of)
    for prefix, side in (("vllm", "accepted"), ("dflash", "drafted")):
        name = f"spec_decode_num_{'draft' if side == 'drafted' else side}_tokens"
        places = [grown[f"{prefix}:{name}_per_pos_total", "bundled", str(i)] for i in range(15)]
        assert places == [sum(each[f"{side}_per_pos"][str(i)] for each in of) for i in range(15)]
        assert places == sorted(places, reverse=True)
        assert sum(places) == grown[f"vllm:{name}_total", "bundled"] > 0
    tokens = [usage["completion_tokens"] for usage in (*chats, native)]
    tokens += [usage["output_tokens"] for usage in (response, message)]
    assert grown[("vllm:generation_tokens_total",)] == sum(tokens)
    # Each round has one token that was not drafted.
    rounds = sum(tokens) - grown["vllm:spec_decode_num_accepted_tokens_total", "bundled"]
    assert grown[("sglang:spec_verify_calls_total",)] == rounds
    assert grown[("vllm:prompt_tokens_total",)] > sum(usage["prompt_tokens"] for usage in chats)
    assert grown[("vllm:time_to_first_token_seconds_count",)] == 13
    assert grown[("vllm:e2e_request_latency_seconds_count",)] == 13


def test_nothing_is_compiled_after_warm_up(quiet):
    """Whatever the tests before asked."""
    assert programs_of(quiet.host.engine.engine) == quiet.programs


def test_many_at_once_get_what_they_get_alone(quiet, llm):
    expected = {i: alone(llm, thinking=False, max_tokens=20, temperature=1.0, seed=i).text for i in range(24)}
    found, lock = {}, threading.Lock()

    def ask(i: int) -> None:
        body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 1.0, "seed": i, "chat_template_kwargs": OFF}
        text = httpx.post(f"{quiet.url}/v1/chat/completions", json=body, timeout=120).json()
        with lock:
            found[i] = text["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == expected


def test_a_draining_server_refuses_newcomers(quiet):
    quiet.serving.is_draining = True
    try:
        found = quiet.post("/v1/completions", prompt="x")
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert quiet.http.get("/ready").status_code == 503
        assert quiet.http.get("/health").status_code == 200
    finally:
        quiet.serving.is_draining = False


def test_a_stream_begins_before_it_ends(quiet, monkeypatch):
    """The device brings its second part when the client has the first one."""
    device, reads, seen = quiet.host.engine.engine.runner, itertools.count(), threading.Event()

    def read(*args, original=device.read):
        if next(reads):
            assert seen.wait(120)
        return original(*args)

    monkeypatch.setattr(device, "read", read)
    body = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with quiet.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line:
                seen.set()
    assert line == "" or line == "data: [DONE]"


# The README.

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^curl (?:.*\\\n)*.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_curl_commands_of_the_readme_run(quiet, command):
    command = command.replace("http://127.0.0.1:30000", quiet.url).replace("curl ", "curl --fail-with-body -sS ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found.get("text") or found["choices"][0].get("text") or found["choices"][0]["message"]


def test_the_readme_has_commands():
    assert COMMANDS
