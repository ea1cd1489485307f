"""Fields that change what a request's prompt or answer is: the same whatever is drafted."""

import json

import pytest

from dflash_jax.server import chat_schema, completions, prepare
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.limits import Limits
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, OFF, SCHEMA, TOOL, Running, posted

WIDTHS = (1, 16)
PROMPT = "def clamp(value, low, high):\n    return"
OTHER = {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}}


def same(server, path: str, **body) -> dict:
    """An answer, which is the same with the drafter on and off, greedy and sampled; the greedy one."""
    for more in ({"temperature": 0.9, "seed": 3}, {"temperature": 0}):
        found = []
        for width in WIDTHS:
            answer = server.post(path, **body, **more, block_size=width, return_token_ids=True)
            assert answer.status_code == 200, answer.text
            found.append(answer.json())
        ids = [choice["token_ids"] for choice in found[0]["choices"]]
        assert ids == [choice["token_ids"] for choice in found[1]["choices"]]
    return found[0]


@pytest.fixture
def trusting(llm, quiet):
    """The same engine behind a server that takes chat templates from requests."""
    serving = Serving(llm, in_process(quiet.host), ["tiny"], Limits(trust_request_chat_template=True))
    running = Running(serving, quiet.host)
    yield running
    running.stop()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_prompt_may_be_truncated(quiet, llm, side):
    ids = llm.tokenizer.encode(PROMPT)
    kept = ids[:5] if side == "right" else ids[-5:]
    more = {"truncate_prompt_tokens": 5} | ({"truncation_side": side} if side else {})
    found = same(quiet, "/v1/completions", prompt=PROMPT, max_tokens=24, **more)["choices"][0]
    assert found["prompt_token_ids"] == kept
    assert found["token_ids"] == same(quiet, "/v1/completions", prompt=kept, max_tokens=24)["choices"][0]["token_ids"]
    whole = same(quiet, "/v1/completions", prompt=PROMPT, max_tokens=4, truncate_prompt_tokens=500)["choices"][0]
    assert whole["prompt_token_ids"] == ids


def test_a_thought_that_was_cut_off_is_not_open(quiet):
    """The prompt's own <think> is at its end."""
    body = {"messages": MESSAGES, "max_tokens": 16, "truncation_side": "right"}
    found = same(quiet, "/v1/chat/completions", **body, truncate_prompt_tokens=6)["choices"][0]["message"]
    assert found["reasoning"] is None
    assert found["content"]
    assert same(quiet, "/v1/chat/completions", **body)["choices"][0]["message"]["reasoning"]


def test_a_chat_may_be_truncated(quiet):
    whole = quiet.chat(max_tokens=4, return_token_ids=True)["prompt_token_ids"]
    found = same(quiet, "/v1/chat/completions", messages=MESSAGES, max_tokens=16, truncate_prompt_tokens=6)
    assert len(found["prompt_token_ids"]) == 6
    assert quiet.chat(max_tokens=4, return_token_ids=True, truncate_prompt_tokens=3)["prompt_token_ids"] == whole[-3:]


@pytest.mark.parametrize("new", [None, 100])
def test_a_prompt_may_be_truncated_to_the_room_there_is(quiet, new):
    long = list(range(5, 205)) * 10
    assert quiet.post("/v1/completions", prompt=long, max_tokens=8).status_code == 400
    more = {} if new is None else {"max_tokens": new}
    found = quiet.post("/v1/chat/completions", messages=[{"role": "user", "content": "word " * 3000}], **more)
    assert found.status_code == 400
    body = {"prompt": long, "truncate_prompt_tokens": -1, "return_token_ids": True, "ignore_eos": True} | more
    found = quiet.post("/v1/completions", **body)
    assert found.status_code == 200, found.text
    capacity = quiet.serving.capacity
    assert found.json()["choices"][0]["prompt_token_ids"] == long[-(capacity - (new or 1)) :]


def test_a_chat_is_not_truncated_to_nothing_for_many_new_tokens(quiet):
    body = {"messages": [{"role": "user", "content": "word " * 3000}], "truncate_prompt_tokens": -1}
    found = quiet.post("/v1/chat/completions", **body, max_tokens=quiet.serving.capacity)
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "context_length_exceeded"
    found = quiet.post("/v1/chat/completions", **body, max_tokens=8, return_token_ids=True)
    assert len(found.json()["prompt_token_ids"]) == quiet.serving.capacity - 8


@pytest.mark.parametrize("value", [0, -2, "5", 2.5, [5]])
def test_truncation_to_what_is_no_length(quiet, value):
    found = quiet.post("/v1/completions", prompt=PROMPT, truncate_prompt_tokens=value)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_chats_prompt_comes_back_with_its_logprobs(quiet):
    body = {"messages": MESSAGES, "max_tokens": 4, "prompt_logprobs": 2}
    found = same(quiet, "/v1/chat/completions", **body)
    ids = found["prompt_token_ids"]
    text = quiet.post("/v1/completions", prompt=ids, max_tokens=4, prompt_logprobs=2).json()
    assert found["prompt_logprobs"] == text["choices"][0]["prompt_logprobs"]
    assert len(found["prompt_logprobs"]) == len(ids)
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_prompt_token_ids=True).json()
    assert found["choices"][0]["prompt_token_ids"] == ids
    assert found["prompt_token_ids"] is None
    found = quiet.post("/v1/chat/completions", **body, stream=True)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt_logprobs")


def chunks(server, **body) -> list[dict]:
    with server.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        return [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]


def test_a_streams_first_chunk_has_the_prompts_ids(quiet):
    found = chunks(quiet, messages=MESSAGES, max_tokens=8, n=2, return_token_ids=True)
    ids = quiet.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True).json()
    assert found[0]["prompt_token_ids"] == ids["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in found[1:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"])
def test_known_prefixes_are_shared_with_the_same_salt_only(quiet, path):
    text = f"{path} is salted. " * 20
    body = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        "/v1/completions": {"prompt": text, "max_tokens": 4},
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": 4}},
        "/v1/responses": {"input": text, "max_output_tokens": 4},
    }[path]

    def cached(**more) -> int:
        # "auto" may process a prompt with the drafter only the second time, which cannot use what the first time left.
        found = quiet.post(path, **body, block_size=1, **more).json()
        if path == "/generate":
            return found["meta_info"]["cached_tokens"]
        kind = "input" if path == "/v1/responses" else "prompt"
        return found["usage"][f"{kind}_tokens_details"]["cached_tokens"]

    counts = [cached(**more) for more in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    assert counts[1] == counts[3] > 20
    assert counts[2] < 20 > counts[4]
    for bad in ("", 5, "x" * 1025):
        assert quiet.post(path, **body, cache_salt=bad).status_code == 400


CUT = [*MESSAGES, {"role": "assistant", "content": "```python\ndef clamp(x, low"}]


def test_the_last_message_may_go_on(quiet, llm):
    found = same(quiet, "/v1/chat/completions", messages=CUT, max_tokens=24, continue_final_message=True)
    prompt = llm.tokenizer.decode(found["prompt_token_ids"])
    assert prompt.endswith("```python\ndef clamp(x, low")
    assert found["choices"][0]["message"]["reasoning"] is None
    text = same(quiet, "/v1/completions", prompt=found["prompt_token_ids"], max_tokens=24)["choices"][0]
    assert found["choices"][0]["token_ids"] == text["token_ids"]
    assert found["choices"][0]["message"]["content"] == text["text"]
    body = {"messages": CUT, "max_tokens": 24, "continue_final_message": True, "add_generation_prompt": False}
    again = quiet.post("/v1/chat/completions", **body, temperature=0).json()
    assert again["choices"][0]["message"] == found["choices"][0]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": CUT, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": MESSAGES, "continue_final_message": True},
    ],
    ids=["both", "no answer"],
)
def test_what_cannot_go_on(quiet, body):
    found = quiet.post("/v1/chat/completions", **body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "continue_final_message")


def test_prompt_without_generation_prompt_is_a_shorter_prefix(quiet):
    body = {"messages": MESSAGES, "max_tokens": 2}
    with_prompt = same(quiet, "/v1/chat/completions", **body)["prompt_token_ids"]
    without = same(quiet, "/v1/chat/completions", **body, add_generation_prompt=False)["prompt_token_ids"]
    assert without == with_prompt[: len(without)]
    assert len(without) < len(with_prompt)
    ids = quiet.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert ids == without


def test_a_template_of_a_requests_own(quiet, trusting, llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!{{ name }}"
    body = {"messages": MESSAGES, "chat_template": template, "chat_template_kwargs": {"name": "x"}, "max_tokens": 8}
    found = same(trusting, "/v1/chat/completions", **body)
    assert llm.tokenizer.decode(found["prompt_token_ids"]) == f"{MESSAGES[0]['content']}!x"
    for more in ({}, {"chat_template_kwargs": {"chat_template": template}, "chat_template": None}):
        refused = quiet.post("/v1/chat/completions", **(body | more))
        assert refused.status_code == 400
        assert "chat_template" in refused.json()["error"]["param"]
    assert "--trust-request-chat-template" in quiet.post("/v1/chat/completions", **body).json()["error"]["message"]
    assert quiet.post("/tokenize", messages=MESSAGES, chat_template=template).status_code == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{% for",
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 1 / 0 }}",
        "{{ x.y.z }}",
        "",
    ],
)
def test_templates_that_are_refused(trusting, template):
    found = trusting.post("/v1/chat/completions", messages=MESSAGES, chat_template=template, max_tokens=1)
    assert found.status_code == 400, found.text
    assert "root:" not in found.text


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        *(
            ({"reasoning_effort": effort}, {"reasoning_effort": effort, "enable_thinking": True})
            for effort in ("minimal", "low", "medium", "high", "xhigh", "max")
        ),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "high", "enabled": False}}, {"reasoning_effort": "high", "enable_thinking": False}),
        ({"enable_thinking": True, "reasoning": {"enabled": False}}, {"enable_thinking": True}),
        ({"enable_thinking": True, "chat_template_kwargs": OFF}, OFF),
        ({"reasoning_effort": "low", "chat_template_kwargs": OFF}, {"reasoning_effort": "low", **OFF}),
    ],
)
def test_how_much_to_think(body, options):
    assert chat_schema.ChatRequest.model_validate({"messages": MESSAGES} | body).template_options == options


@pytest.mark.parametrize("body", [{"enable_thinking": False}, {"reasoning": {"effort": "none"}}])
def test_thinking_may_be_off_in_several_ways(quiet, body):
    off = quiet.chat(max_tokens=24, chat_template_kwargs=OFF)["choices"][0]["message"]
    assert quiet.chat(max_tokens=24, **body)["choices"][0]["message"] == off
    assert off["reasoning"] is None


def test_the_effort_reaches_the_template(trusting, llm):
    body = {"messages": MESSAGES, "chat_template": "{{ reasoning_effort }} {{ enable_thinking }}", "max_tokens": 1}
    found = trusting.post("/v1/chat/completions", **body, reasoning_effort="max", return_token_ids=True).json()
    assert llm.tokenizer.decode(found["prompt_token_ids"]) == "max True"


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_of_all_tools_some_may_be_allowed(quiet):
    body = {"messages": MESSAGES, "tools": [TOOL, OTHER], "max_tokens": 300, "chat_template_kwargs": OFF}
    for names in (["read_file"], ["list_files"]):
        found = same(quiet, "/v1/chat/completions", **body, tool_choice=allowed("required", *names))
        calls = found["choices"][0]["message"]["tool_calls"]
        assert {call["function"]["name"] for call in calls} == set(names)
    # The model sees all of them all the same.
    prompts = [
        quiet.post("/v1/chat/completions", **body, tool_choice=choice, return_token_ids=True).json()["prompt_token_ids"]
        for choice in ("auto", allowed("required", "list_files"), allowed("auto", "list_files"))
    ]
    assert prompts[0] == prompts[1] == prompts[2]


def test_allowed_tools_need_not_be_called(quiet, llm):
    """Text stays free; a call, once it begins, is one of the allowed tools'."""
    body = {"messages": MESSAGES, "tools": [TOOL, OTHER], "tool_choice": allowed("auto", "list_files")}
    found = same(quiet, "/v1/chat/completions", **body, max_tokens=40, chat_template_kwargs=OFF)
    free = same(
        quiet, "/v1/chat/completions", **body | {"tool_choice": "auto"}, max_tokens=40, chat_template_kwargs=OFF
    )
    if not free["choices"][0]["message"].get("tool_calls"):
        assert found["choices"][0]["token_ids"] == free["choices"][0]["token_ids"]
    start = llm.tokenizer.encode_plain("<tool_call>")
    if len(start) == 1:
        body |= {"logit_bias": {str(start[0]): 100}, "max_tokens": 200, "chat_template_kwargs": OFF}
        found = same(quiet, "/v1/chat/completions", **body)["choices"][0]
        assert {call["function"]["name"] for call in found["message"]["tool_calls"]} == {"list_files"}


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("required", "nothing"), "tool_choice.allowed_tools.tools"),
        (allowed("always", "read_file"), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
        ({"type": "magic"}, "tool_choice.type"),
        ({}, "tool_choice.type"),
        ("always", "tool_choice"),
        (5, "tool_choice"),
    ],
)
def test_a_wrong_tool_choice_is_named_as_it_was_sent(quiet, choice, param):
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert not any(word in error["message"] for word in ("NamedTool", "AllowedTools", "literal", "union", "instance"))


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": 5}, "prompt must be a string or a list"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1] must be a string"),
        ("/v1/completions", {"prompt": [[1], ["x"]]}, "prompt[1][0] must be a whole number"),
        ("/v1/completions", {}, "prompt is missing"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens must be a whole number"),
        ("/v1/completions", {"prompt": "x", "stream_options": 5}, "stream_options must be an object"),
        ("/v1/completions", {"prompt": "x", "stop": 5}, "stop must be a string or a list"),
        ("/v1/chat/completions", {"messages": [5]}, "messages[0] must be an object"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "messages[0].content must be a string or a list of parts",
        ),
        ("/v1/chat/completions", {"messages": "hi"}, "messages must be a list"),
        ("/v1/responses", {"input": 5}, "input must be a string or a list"),
        ("/generate", {"text": 5}, "text must be a string or a list"),
        ("/generate", {"text": "x", "sampling_params": 5}, "sampling_params must be an object or a list"),
        ("/generate", {"text": "x", "sampling_params": {"n": "x"}}, "sampling_params.n must be a whole number"),
    ],
)
def test_messages_are_about_json(quiet, path, body, message):
    found = quiet.post(path, **body)
    assert (found.status_code, found.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("key", ["x", "", " 5", "5_0", "-1", "٣", "9" * 5000, "1.0", "\ud800"])
def test_a_bias_of_no_token_is_named(quiet, key):
    found = posted(quiet, "/v1/completions", ({"prompt": "x", "logit_bias": {key: 1}}))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, "logit_bias")
    assert len(error["message"]) < 300
    assert repr(key[:40]) in error["message"]


def test_all_biases_of_no_token_are_named(quiet):
    biases = {"bad1": 1, "5": 1, "bad2": 1}
    found = quiet.post("/v1/completions", prompt="x", logit_bias=biases).json()["error"]["message"]
    assert found == "logit_bias: its keys must be token ids, and these are not: 'bad1', 'bad2'"
    many = quiet.post("/v1/completions", prompt="x", logit_bias={f"bad{i}": 1 for i in range(99)})
    assert many.json()["error"]["message"].endswith("'bad7' and 91 more")


@pytest.mark.parametrize("width", [1, 8])
def test_stop_tokens_outside_the_vocabulary_never_come(quiet, width):
    """Clients send those of another model along."""
    body = {"prompt": "def f(", "max_tokens": 12, "block_size": width, "return_token_ids": True}
    plain = quiet.post("/v1/completions", **body).json()["choices"]
    found = quiet.post("/v1/completions", **body, stop_token_ids=[119690, 2**40])
    assert found.json()["choices"] == plain
    assert "stop_token_ids: 119690 is out of vocabulary" in found.headers["x-dflash-note"]


def test_a_bias_outside_the_vocabulary_is_named(quiet):
    found = quiet.post("/v1/completions", prompt="x", logit_bias={"99999": 1})
    assert "99999" in found.json()["error"]["message"]
    found = quiet.post("/v1/completions", prompt="x", logit_bias={"5": "x"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "logit_bias.5")


def test_why_a_text_stopped(quiet, llm):
    def reasons(**body) -> tuple:
        whole = same(quiet, "/v1/completions", prompt=PROMPT, **body)["choices"][0]
        chat = same(quiet, "/v1/chat/completions", messages=MESSAGES, chat_template_kwargs=OFF, **body)["choices"][0]
        last = chunks(quiet, messages=MESSAGES, chat_template_kwargs=OFF, temperature=0, **body)[-1]["choices"][0]
        for each in (chat, last):
            assert each["finish_reason"] == whole["finish_reason"]
            assert each["stop_reason"] == whole["stop_reason"]
            assert each["matched_stop"] == whole["matched_stop"]
        return whole["finish_reason"], whole["stop_reason"], whole["matched_stop"]

    eos = llm.defaults.stop_ids[0]
    ends = {"logit_bias": {str(eos): 100}, "max_tokens": 5}
    assert reasons(max_tokens=3) == ("length", None, None)
    assert reasons(**ends) == ("stop", None, eos)
    assert reasons(**ends, stop_token_ids=[eos]) == ("stop", eos, eos)
    token = next(i for i in range(300, 400) if len(llm.tokenizer.decode([i]).strip()) > 1)
    text = llm.tokenizer.decode([token])
    forced = {"logit_bias": {str(token): 100}, "max_tokens": 5}
    assert reasons(**forced, stop_token_ids=[token]) == ("stop", token, token)
    assert reasons(**forced, stop=[text]) == ("stop", text, text)


def test_usage_counts_what_was_told(quiet):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 120, "seed": 3, "temperature": 0.8, "n": 2, "block_size": 16}
    found = chunks(quiet, **body, stream_options=options, return_token_ids=True)
    counted, thoughts, begun = 0, 0, 0
    for chunk in found[:-1]:
        (choice,), usage = chunk["choices"], chunk["usage"]
        details = usage["completion_tokens_details"]
        if "role" in choice["delta"]:
            begun += 1
            assert usage["completion_tokens"] == counted
            assert begun > 1 or set(details.values()) == {0}
        counted += len(choice.get("token_ids", []))
        assert usage["completion_tokens"] == counted == usage["total_tokens"] - usage["prompt_tokens"]
        assert thoughts <= details["reasoning_tokens"] <= counted
        thoughts = details["reasoning_tokens"]
    assert begun == 2
    assert 0 < thoughts < counted
    assert found[-1]["usage"] == found[-2]["usage"]


def test_reasoning_under_both_names(quiet):
    whole = quiet.chat(max_tokens=40, temperature=0)["choices"][0]["message"]
    assert whole["reasoning"] == whole["reasoning_content"] != ""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 0}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(quiet, **body)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_forced_call_that_is_cut_is_no_content(quiet, width):
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "block_size": width, "temperature": 0}
    body |= {"chat_template_kwargs": OFF}
    for most in range(1, 24):
        message = quiet.post("/v1/chat/completions", **body, max_tokens=most).json()["choices"][0]["message"]
        assert not message["content"], (most, message)
    for most in (1, 3, 9):
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(quiet, **body, max_tokens=most)]
        assert not any(delta.get("content") for delta in deltas)
    stopped = quiet.post("/v1/chat/completions", **body, max_tokens=99, stop=["name"]).json()["choices"][0]
    assert not stopped["message"]["content"]


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_an_empty_stop_string_is_none(quiet, path, name):
    body = {"prompt": "x", "max_tokens": 2} if path == "/v1/completions" else {"messages": MESSAGES, "max_tokens": 2}
    if path == "/generate":
        body = {"text": "x", "sampling_params": {"max_new_tokens": 2, name: ""}}
    else:
        body |= {name: ""}
    assert quiet.post(path, **body).status_code == 200


def test_a_suffix_follows_the_gap(quiet, llm, monkeypatch):
    """The bundled tokenizer has no tokens for it, so that others stand for them."""
    body = {"max_tokens": 4, "return_token_ids": True, "temperature": 0}
    names = ("<think>", "<tool_call>", "</tool_call>")
    monkeypatch.setattr(completions, "INFILL", names)
    monkeypatch.setattr(completions, "INFILL_ENDS", ("</think>", "<|endoftext|>", "<|fim_pad|>"))
    encode = llm.tokenizer.encode_plain
    (before,), (between,), (after,) = map(encode, names)
    expected = [before, *encode("def f("), between, *encode("\n    return x"), after]
    for prompt in ("def f(", encode("def f(")):
        found = quiet.post("/v1/completions", prompt=prompt, suffix="\n    return x", **body)
        assert found.status_code == 200, found.text
        choice = found.json()["choices"][0]
        assert choice["prompt_token_ids"] == expected
        plain = quiet.post(
            "/v1/completions", prompt=expected, **body, stop_token_ids=[before, between, after, *encode("</think>")]
        )
        assert choice["text"] == plain.json()["choices"][0]["text"]
    for token in (before, *encode("</think>")):
        forced = body | {"logit_bias": {str(token): 100}}
        ended = quiet.post("/v1/completions", prompt="def f(", suffix="x", **forced).json()["choices"][0]
        assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", token)
    for more in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        refused = quiet.post("/v1/completions", prompt="x", suffix="y", **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, *more)
    assert (
        quiet.post("/v1/completions", prompt="x", suffix="y", **body, stop_token_ids=list(range(16, 30))).status_code
        == 200
    )


def test_a_suffix_without_tokens_for_it_is_refused(quiet):
    found = quiet.post("/v1/completions", prompt="x", suffix="y")
    assert (found.status_code, found.json()["error"]["param"]) == (400, "suffix")
    assert quiet.post("/v1/completions", prompt="x", suffix="", max_tokens=1).status_code == 200


# How clients of several servers name a tool, or say that one must be called.
CHOICES = {
    "OpenAI": {"type": "function", "function": {"name": "read_file"}},
    "Zed": {"type": "function", "function": TOOL["function"] | {"description": None}},
    "flat": {"type": "function", "name": "read_file"},
    "Anthropic": {"type": "tool", "name": "read_file"},
    "Anthropic, any": {"type": "any"},
    "Mistral": "any",
    "a type": {"type": "required"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_a_tool_in_the_forms_of_all_servers(quiet, name):
    body = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 200, "temperature": 0, "chat_template_kwargs": OFF}
    found = quiet.post("/v1/chat/completions", **body, tool_choice=CHOICES[name])
    assert found.status_code == 200, found.text
    assert found.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "read_file"


@pytest.mark.parametrize("choice", ["auto", "none", {"type": "auto"}, {"type": "none"}])
def test_choices_of_no_tool(quiet, choice):
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, tools=[TOOL], max_tokens=1, tool_choice=choice)
    assert found.status_code == 200, found.text


# Fields for thinking, and the template's variables and the budget that they are.
THINKING = {
    "DashScope": ({"enable_thinking": True, "preserve_thinking": True, "thinking_budget": 9}, (True, True), 9),
    "llama.cpp": ({"thinking_budget_tokens": 9}, (None, None), 9),
    "Baseten": ({"chat_template_args": {"enable_thinking": False}}, (False, None), None),
    "OpenRouter": ({"reasoning": {"enabled": True, "max_tokens": 9, "summary": "auto"}}, (True, None), 9),
    "GLM": ({"thinking": {"type": "enabled", "clear_thinking": False}}, (True, True), None),
    "Kimi": ({"thinking": {"type": "enabled", "keep": "all"}}, (True, True), None),
    "DeepSeek": ({"thinking": {"type": "disabled"}}, (False, None), None),
    "Anthropic": ({"thinking": {"type": "enabled", "budget_tokens": 9}}, (True, None), 9),
    "two": ({"thinking": {"type": "enabled"}, "enable_thinking": False}, (False, None), None),
}


@pytest.mark.parametrize("name", THINKING)
def test_thinking_in_the_words_of_all_servers(quiet, name):
    fields, switches, budget = THINKING[name]
    body = chat_schema.ChatRequest(messages=MESSAGES, **fields)
    assert tuple(body.template_options.get(key) for key in ("enable_thinking", "preserve_thinking")) == switches
    assert prepare.budget(body.budgets) == budget
    assert quiet.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1, **fields).status_code == 200


def test_functions_are_tools_in_openais_older_form(quiet):
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "chat_template_kwargs": OFF}
    today = quiet.post(
        "/v1/chat/completions", **body, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ).json()["choices"][0]["message"]["tool_calls"][0]
    body |= {"functions": [TOOL["function"]], "function_call": {"name": "read_file"}}
    (choice,) = quiet.post("/v1/chat/completions", **body).json()["choices"]
    assert (choice["message"]["function_call"], choice["finish_reason"]) == (today["function"], "function_call")
    assert "tool_calls" not in choice["message"]
    found = chunks(quiet, **body)
    calls = [c["delta"]["function_call"] for each in found for c in each["choices"] if "function_call" in c["delta"]]
    assert calls[0]["name"] == "read_file"
    assert "".join(call["arguments"] for call in calls) == today["function"]["arguments"]
    assert found[-1]["choices"][0]["finish_reason"] == "function_call"
    prompts = []
    for history in (
        [choice["message"], {"role": "function", "name": "read_file", "content": "x = 1"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [today]},
            {"role": "tool", "tool_call_id": today["id"], "content": "x = 1"},
        ],
    ):
        more = {"messages": [*MESSAGES, *history, *MESSAGES], "function_call": "none", "return_token_ids": True}
        answer = quiet.post("/v1/chat/completions", **body | more | {"max_tokens": 1})
        assert answer.status_code == 200, answer.text
        prompts.append(answer.json()["prompt_token_ids"])
    assert prompts[0] == prompts[1]
    none = quiet.post("/v1/chat/completions", messages=MESSAGES, functions=[], function_call="auto", max_tokens=1)
    assert none.status_code == 200, none.text
    # Beside today's field without any.
    assert quiet.post("/v1/chat/completions", **body, tools=[]).json()["choices"] == [choice]


def test_an_older_call_beside_todays_calls_leaves_these_as_they_are(quiet):
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": {"x": i}}} for i in "ab"]
    prompts = []
    for more in ({}, {"function_call": calls[0]["function"]}, {"function_call": None}):
        history = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls} | more]
        history += [{"role": "tool", "tool_call_id": i, "content": i} for i in "ba"]
        answer = quiet.post("/v1/chat/completions", messages=history, max_tokens=1, return_token_ids=True)
        prompts.append(answer.json()["prompt_token_ids"])
    assert prompts == prompts[:1] * 3
    for wrong in ({"name": 5, "arguments": "{}"}, {"arguments": "{}"}):
        history = [*MESSAGES, {"role": "assistant", "content": None, "function_call": wrong}]
        error = quiet.post("/v1/chat/completions", messages=history, max_tokens=1).json()["error"]
        assert error["param"] == "messages[1].function_call", error


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_message_that_is_continued_by_its_own_field(quiet, name):
    said = {"role": "assistant", "content": "def clamp(value"}
    body = {"max_tokens": 8, "temperature": 0, "chat_template_kwargs": OFF}
    texts = [
        quiet.post("/v1/chat/completions", messages=[*MESSAGES, message], **body, **more).json()["choices"][0][
            "message"
        ]
        for message, more in (
            (said | {name: True}, {}),
            (said, {"continue_final_message": True}),
            (said | {name: False}, {}),
        )
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_of_the_form(quiet, kind):
    body = {"messages": MESSAGES, "max_tokens": 80, "temperature": 0, "chat_template_kwargs": OFF}
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    texts = [
        quiet.post("/v1/chat/completions", **body, response_format=each).json()["choices"][0]["message"]["content"]
        for each in (form, {"type": kind, "schema": SCHEMA})
    ]
    assert texts[0] == texts[1]
    assert set(json.loads(texts[0])) == {"kind", "n"}


def test_tools_without_their_envelope(quiet):
    """Some clients send the tools of /v1/responses or of /v1/messages to chats."""
    function = TOOL["function"]
    anthropics = {"name": function["name"], "description": function["description"]}
    flat = [
        {"type": "function", **function},
        function,
        anthropics | {"input_schema": function["parameters"]},
    ]
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    prompts = [
        quiet.post("/v1/chat/completions", **body, tools=[tool]).json()["prompt_token_ids"] for tool in (TOOL, *flat)
    ]
    assert all(prompt == prompts[0] for prompt in prompts)
    wrong = quiet.post("/v1/chat/completions", **body, tools=[{"type": "web_search"}]).json()["error"]
    assert wrong["param"] == "tools[0].type"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_minus_one_is_none(quiet, name):
    body = {"messages": MESSAGES, "temperature": 0, "stop": ["("]}
    answers = [quiet.post("/v1/chat/completions", **body, **more).json() for more in ({}, {name: -1})]
    assert answers[0]["choices"] == answers[1]["choices"]
    for wrong in (-2, 0, True):
        assert quiet.post("/v1/chat/completions", **body, **{name: wrong}).status_code == 400
