"""``/v1/responses`` as Codex asks it: its tools, its items, and what its parser reads of a stream."""

import hashlib
import json

import openai
import pytest

from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError
from dflash_jax.server.chat_schema import Tool
from dflash_jax.server.errors import ApiError, TooLongError
from dflash_jax.server.request_context import current
from dflash_jax.server.responses_input import SUMMARY, InputItem, ResponsesTool, Tools, as_chat_item, as_messages
from tests.server.conftest import NAME, OFF

TOOLS = [
    {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
     "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__docs", "description": "Docs.",
     "tools": [{"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}]},
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
    {"type": "tool_search"},
    {"type": "image_generation"},
]  # fmt: skip
TEXT = "input_text"
INPUT = [
    {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": TEXT, "text": "rules"}]},
    {"type": "message", "role": "developer", "content": [{"type": TEXT, "text": "a"}, {"type": TEXT, "text": "b"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "<environment_context/>"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "Fix it."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "gAAAA"},
    {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    {"type": "function_call", "call_id": "c3", "namespace": "mcp__docs", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": TEXT, "text": "found"}]},
    {"type": "local_shell_call", "call_id": "c4", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c4", "output": "a.py"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "compaction", "encrypted_content": "gAAAA"},
    {"type": "message", "role": "developer", "content": [{"type": TEXT, "text": "late"}]},
    {"type": "message", "role": "user", "content": [{"type": TEXT, "text": "And now?"}]},
]
BODY = {
    "input": INPUT,
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "b6a1",
    "client_metadata": {"x": "1", "turn": "{}"},
    "chat_template_kwargs": OFF,
    "max_output_tokens": 60,
    "temperature": 0,
}
HI = [{"role": "user", "content": "Write the function `clamp`: Limit a value to a range."}]
TALK = {"chat_template_kwargs": OFF, "tools": TOOLS[:3]}
JSON_TYPE = "application/json"


def events(server, **body) -> list[dict]:
    with server.http.stream("POST", "/v1/responses", json=BODY | body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_request_of_codex_is_answered(quiet):
    answer = quiet.post("/v1/responses", **BODY)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["status"] in ("completed", "incomplete")
    assert [tool["type"] for tool in found["tools"]] == [tool["type"] for tool in TOOLS]
    note = answer.headers["x-dflash-note"]
    assert all(name in note for name in ("web_search", "local_shell", "tool_search", "image_generation"))


def test_items_are_messages_of_a_chat():
    messages = as_messages(None, [as_chat_item(InputItem(**item)) for item in INPUT])
    roles = [message["role"] for message in messages]
    assert roles == ["developer"] * 2 + ["user"] * 2 + ["assistant", "tool"] * 4 + ["developer", "user"]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("exec_command", {"cmd": "ls"}),
        ("apply_patch", {"input": "*** Begin"}),
        ("mcp__docs__search", {}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    assert messages[4]["reasoning_content"] == "Hm."
    assert not any("gAAAA" in str(message) for message in messages)


@pytest.mark.parametrize(
    ("last", "right"),
    [
        ([{"role": "assistant", "content": "c"}], [{"content": "c", "reasoning_content": "a\nb"}]),
        ([], [{"content": "", "reasoning_content": "a\nb"}]),
        ([HI[0]], [{"content": "", "reasoning_content": "a\nb"}, HI[0]]),
    ],
)
def test_thoughts_in_a_row_are_one(last, right):
    """As where something that is left out was between them."""
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "ab"]
    items = [InputItem(**item) for item in [HI[0], thoughts[0], {"type": "web_search_call"}, thoughts[1], *last]]
    assert as_messages(None, items) == [HI[0], *({"role": "assistant"} | message for message in right)]


def test_searches_without_ids_are_calls_with_their_results():
    """As OpenAI's servers run them."""
    call = {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"query": "x"}}
    found = {"type": "tool_search_output", "execution": "server", "status": "completed", "tools": TOOLS[:1]}
    called, result = as_messages(None, [as_chat_item(InputItem(**item)) for item in (call, found)])
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "tool_search"
    assert json.loads(result["content"]) == TOOLS[:1]


@pytest.mark.parametrize("item", [{"type": "compaction", "encrypted_content": "gAAAA"}, {"type": "web_search_call"}])
def test_an_input_that_says_nothing_is_refused_by_name(quiet, item):
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        found = quiet.post(path, input=[item])
        assert (found.status_code, found.json()["error"]["param"]) == (400, "input")
        assert "nothing that the model reads" in found.json()["error"]["message"]


def test_tools_are_functions_by_flat_names():
    tools = Tools.of([ResponsesTool(**tool) for tool in TOOLS])
    names = [tool[tool["type"]]["name"] for tool in tools.functions]
    assert names == ["exec_command", "apply_patch", "mcp__docs__search"]
    assert (tools.customs, tools.namespaces) == ({"apply_patch"}, {"mcp__docs__search": ("mcp__docs", "search")})
    assert "start: /.+/" in Tool(**tools.functions[1]).function.description


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "magic", "name": "x"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "x"}]}, "tools[0].tools[0]"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "x"}] * 10**5}, "tools"),
    ],
)
def test_other_tools_are_refused_by_name(tool, param):
    with pytest.raises(ApiError) as error:
        Tools.of([ResponsesTool(**tool)])
    assert error.value.param == param


def test_a_custom_tool_is_called_with_a_text(quiet):
    found = events(quiet, tool_choice={"type": "custom", "name": "apply_patch"}, max_output_tokens=200, temperature=0.9)
    kinds = [event["type"] for event in found]
    (done,) = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (done["type"], done["name"]) == ("custom_tool_call", "apply_patch")
    assert isinstance(done["input"], str)
    assert done["id"].startswith("ctc_")
    (delta,) = [event for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert (delta["delta"], delta["item_id"]) == (done["input"], done["id"])
    assert "response.function_call_arguments.delta" not in kinds
    # It goes on.
    output = {"type": "custom_tool_call_output", "call_id": done["call_id"], "output": "ok"}
    later = quiet.post("/v1/responses", **BODY | {"input": [*INPUT, done, output]})
    assert later.status_code == 200, later.text


def test_a_function_of_a_namespace_is_called_by_both_names(quiet):
    choice = {"type": "function", "name": "mcp__docs__search"}
    found = events(quiet, tool_choice=choice, max_output_tokens=100, store=True)
    (done,) = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (done["type"], done["namespace"], done["name"]) == ("function_call", "mcp__docs", "search")
    # Also where the conversation is the server's.
    output = {"type": "function_call_output", "call_id": done["call_id"], "output": "ok"}
    body = BODY | {"input": [output], "previous_response_id": found[-1]["response"]["id"]}
    assert quiet.post("/v1/responses", **body).status_code == 200


def test_a_request_without_input_is_answered_by_its_instructions(quiet):
    answer = quiet.post("/v1/responses", input=[], instructions="Be brief.", max_output_tokens=4)
    assert answer.status_code == 200, answer.text
    assert quiet.post("/v1/responses", input=[], max_output_tokens=4).status_code == 400


# Thoughts that clients keep.


def thought_of(server, **body) -> dict:
    found = server.post("/v1/responses", **BODY | {"input": HI, "chat_template_kwargs": None} | body)
    assert found.status_code == 200, found.text
    return found.json()["output"][0]


def tokens(server, items, **more) -> int:
    found = server.http.post("/v1/responses/input_tokens", json=TALK | {"input": items}, **more)
    assert found.status_code == 200, found.text
    assert found.json()["object"] == "response.input_tokens"
    return found.json()["input_tokens"]


def test_a_thought_goes_on_from_its_seal(quiet):
    """As Codex sends it back: without its text."""
    thought = thought_of(quiet)
    assert thought["type"] == "reasoning"
    call = INPUT[5]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    as_text = tokens(quiet, [*HI, {"type": "reasoning", "summary": [], "content": thought["content"]}, call])
    without = tokens(quiet, [*HI, {"type": "reasoning", "summary": []}, call])
    assert as_text > without
    assert tokens(quiet, [*HI, kept, call]) == as_text
    # Other clients' and changed ones say nothing.
    assert tokens(quiet, [*HI, kept, call], headers={"Authorization": "Bearer other"}) == without
    sealed = kept["encrypted_content"]
    for other in ("gAAAA", sealed[:-8], sealed.lower(), "\ud800", 5, {"a": []}, "dflash1." + "A" * 2**22):
        body = json.dumps(TALK | {"input": [*HI, kept | {"encrypted_content": other}, call]})
        found = quiet.http.post("/v1/responses/input_tokens", content=body, headers={"Content-Type": JSON_TYPE})
        assert found.json().get("input_tokens") == without, found.text


def test_thoughts_are_sealed_where_asked_for(quiet):
    assert "encrypted_content" not in thought_of(quiet, include=None)
    assert "encrypted_content" in thought_of(quiet)
    *_, last = events(quiet, input=HI, chat_template_kwargs=None, store=True)
    done = last["response"]["output"][0]
    assert "encrypted_content" in done
    stored = quiet.http.get(f"/v1/responses/{last['response']['id']}").json()["output"][0]
    assert stored == {name: value for name, value in done.items() if name != "encrypted_content"}


# Summaries in place of conversations.


def is_summary(item: dict) -> bool:
    return item["type"] == "compaction" and set(item) == {"id", "type", "encrypted_content"}


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"text": {"format": {"type": "json_object"}}}])
def test_a_trigger_asks_for_a_summary_alone(quiet, options):
    """Codex takes the one item of its type from a stream that is completed, and shows no other."""
    found = events(quiet, input=[*INPUT, {"type": "compaction_trigger"}], **options)
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert set(kinds[3:-2]) == {"response.compaction.compacting"}
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    (item,) = found[-1]["response"]["output"]
    assert found[-2]["item"] == item
    assert is_summary(item)
    assert found[-1]["response"]["usage"]["output_tokens"] == BODY["max_output_tokens"]
    # It stands for what was before it, but for messages of the system and the user.
    late = {"role": "user", "content": "On."}
    summary = {"role": "user", "content": unsealed(quiet, item)}
    kept = [message for message in INPUT if message["type"] == "message"]
    assert tokens(quiet, [*INPUT, item, late]) == tokens(quiet, [*kept, summary, late])
    again = {**item, "type": "compaction_summary", "id": None}
    assert tokens(quiet, [*INPUT, item, *INPUT, again, late]) == tokens(quiet, [*kept, *kept, summary, late])
    for other in (item | {"encrypted_content": "gAAAA"}, {"type": "context_compaction"}):
        assert tokens(quiet, [*INPUT, other, late]) == tokens(quiet, [*INPUT, late])
    # What was before it may be lost, so a note says so.
    for given, is_noted in ((item, False), (item | {"encrypted_content": "gAAAA"}, True)):
        noted = quiet.post("/v1/responses/input_tokens", input=[given, late]).headers.get("x-dflash-note", "")
        assert ("compaction: left out" in noted) == is_noted


def unsealed(server, item: dict) -> str:
    owner = hashlib.sha256(b"").digest()
    text = server.serving.response_store.unseal(owner, "compaction", item["encrypted_content"])
    assert text is not None
    return SUMMARY + text


def test_limits_of_the_answer_do_not_cut_the_summary(quiet):
    """A summary that ends early loses the conversation."""
    items = [*HI, {"type": "compaction_trigger"}]
    whole = unsealed(quiet, quiet.post("/v1/responses", **BODY | {"input": items}).json()["output"][0])
    for more in (
        {"stop": ["e"]},
        {"stop_regex": "e"},
        {"min_tokens": 60},
        {"allowed_token_ids": [5]},
        {"bad_words": ["e"]},
    ):
        found = quiet.post("/v1/responses", **BODY | {"input": items} | more).json()
        assert unsealed(quiet, found["output"][0]) == whole, more
    # Of the answer after it they are kept.
    edit = {"context_management": [{"type": "compaction", "compact_threshold": 1}], "min_tokens": 80, "stop": ["e"]}
    found = quiet.post("/v1/responses", **BODY | {"input": HI, "max_output_tokens": 80} | edit)
    assert found.status_code == 200, found.text
    assert found.json()["output"][1]["status"] == "completed" or found.json()["usage"]["output_tokens"] == 80


def test_a_trigger_is_the_last_item(quiet):
    items = [*HI, {"type": "compaction_trigger"}]
    found = quiet.post("/v1/responses", **BODY | {"input": items + HI})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input[1]")
    # Without anything to sum up, too, there is one item.
    found = quiet.post("/v1/responses", **BODY | {"input": items[1:]})
    assert is_summary(*found.json()["output"])


def test_a_summary_that_says_nothing_is_none(quiet):
    """The conversation is not lost."""
    end = quiet.serving.llm.defaults.stop_ids
    asked = {"input": [*HI, {"type": "compaction_trigger"}], "logit_bias": {str(token): 100 for token in end}}
    found = quiet.post("/v1/responses", **BODY | asked)
    assert found.status_code == 500
    assert "no summary" in found.json()["error"]["message"]
    assert quiet.post("/v1/responses/compact", **TALK | asked).status_code == 500
    *_, last = events(quiet, **asked)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_a_summary_that_never_leaves_its_thought_is_that_thought(quiet):
    options = {"chat_template_kwargs": {"enable_thinking": True}, "max_output_tokens": 16}
    found = quiet.post("/v1/responses", **BODY | options | {"input": [*HI, {"type": "compaction_trigger"}]})
    assert found.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert unsealed(quiet, found.json()["output"][0]) != SUMMARY


def test_a_summary_calls_nothing(quiet):
    start = quiet.serving.llm.tokenizer.encode_plain("<tool_call>")
    bias = {str(start[0]): 100}
    items = [*HI, {"type": "compaction_trigger"}]
    found = quiet.post("/v1/responses", **BODY | {"input": items, "logit_bias": bias})
    assert unsealed(quiet, found.json()["output"][0]) != SUMMARY
    assert "<tool_call>" not in unsealed(quiet, found.json()["output"][0])


def test_a_conversation_goes_on_from_a_stored_summary(client, quiet):
    """By the response's id, and by the item's."""
    options = {"model": NAME, "max_output_tokens": 30, "temperature": 0, "extra_body": {"chat_template_kwargs": OFF}}
    first = client.responses.create(**options, input=HI)
    short = client.responses.create(
        **options, input=[{"type": "compaction_trigger"}], previous_response_id=first.id, instructions="Be brief."
    )
    (item,) = short.output
    named = {"type": "item_reference", "id": item.id}
    sent = [*HI, item.model_dump(exclude_none=True), *HI]
    by_item = client.responses.create(**options, input=[*HI, named, *HI])
    by_response = client.responses.create(**options, input=HI, previous_response_id=short.id)
    assert by_item.usage.input_tokens == by_response.usage.input_tokens
    assert by_item.usage.input_tokens == client.responses.create(**options, input=sent).usage.input_tokens
    # Once more, the older summary is no part of the newer one's conversation.
    later = client.responses.create(
        **options, input=[{"type": "compaction_trigger"}], previous_response_id=by_response.id
    )
    kinds = [i.type for i in client.responses.input_items.list(later.id, order="asc")]
    assert kinds == ["message", "compaction", "message", "message"]
    last = client.responses.create(**options, input=HI, previous_response_id=later.id)
    kinds = [i.type for i in client.responses.input_items.list(last.id, order="asc")]
    assert kinds == ["message", "message", "compaction", "message"]


def test_compact_answers_with_messages_and_a_summary(client, quiet):
    found = client.responses.compact(model=NAME, input=INPUT[:7], instructions="Be brief.")
    assert found.object == "response.compaction"
    assert [item.type for item in found.output] == ["message"] * 4 + ["compaction"]
    assert [item.role for item in found.output[:-1]] == ["developer"] * 2 + ["user"] * 2
    assert found.usage.output_tokens > 0
    # What it gives is the next input.
    items = [item.model_dump(exclude_none=True, warnings=False) for item in found.output]
    assert client.responses.create(model=NAME, input=[*items, *HI], max_output_tokens=4).output
    first = client.responses.create(model=NAME, input=HI, max_output_tokens=4)
    found = client.responses.compact(model=NAME, previous_response_id=first.id)
    assert [item.type for item in found.output] == ["message", "compaction"]
    with pytest.raises(openai.NotFoundError):
        client.with_options(api_key="other").responses.compact(model=NAME, previous_response_id=first.id)
    body = TALK | {"input": [*HI, {"type": "compaction_trigger"}], "max_output_tokens": 4}
    assert is_summary(quiet.post("/v1/responses/compact", **body).json()["output"][-1])
    wrong = quiet.post("/v1/responses/compact", input=HI, stream=True)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stream")


def test_a_conversation_that_does_not_fit_is_summed_up_without_its_beginning(quiet):
    turns = [{"role": role, "content": "word " * 10} for role in ("user", "assistant")] * 50
    body = {"input": [*turns, {"type": "compaction_trigger"}], "chat_template_kwargs": OFF}
    found = quiet.post("/v1/responses", **body)
    assert found.status_code == 200, found.text
    assert is_summary(*found.json()["output"])
    assert found.json()["status"] == "completed"
    assert quiet.post("/v1/responses", input=turns).status_code == 400


def test_a_conversation_beyond_a_threshold_is_summed_up_before_the_answer(quiet):
    edit = {"type": "compaction", "compact_threshold": 20}
    asked = BODY | {"context_management": [edit], "input": [*HI, *INPUT[4:7]], "store": True, "tools": TOOLS[:3]}
    asked |= {"max_output_tokens": 30}
    found = events(quiet, **asked)
    kinds = [event["type"] for event in found]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    last = found[-1]["response"]
    assert items == last["output"]
    assert is_summary(items[0])
    assert [item["type"] for item in items[1:]] == ["message"]
    assert len({item["id"][-32:-8] for item in items}) == 1
    # The answer is of what the summary and the user say, in this turn and in a later one.
    summary = {"role": "user", "content": unsealed(quiet, items[0])}
    assert last["usage"]["input_tokens"] == tokens(quiet, [*HI, summary])
    # The limit of the answer is not the summary's.
    assert len(quiet.serving.llm.tokenizer.encode_plain(summary["content"].removeprefix(SUMMARY))) > 40
    late = HI[0]
    whole = tokens(quiet, [*asked["input"], *items, late])
    assert whole == tokens(quiet, [*HI, summary, items[1], late])
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    assert tokens(quiet, [*HI, *named, late]) == whole
    body = TALK | {"input": [late], "previous_response_id": last["id"]}
    assert quiet.post("/v1/responses/input_tokens", **body).json()["input_tokens"] == whole
    # Not streamed, it is the same, and so it is where the whole does not fit; below the threshold there is none.
    assert is_summary(quiet.post("/v1/responses", **asked | {"stream": False}).json()["output"][0])
    long = [{"role": role, "content": "word " * 20} for role in ("user", "assistant")] * 40
    beyond = asked | {"context_management": [{"type": "compaction"}], "input": [*long, *HI], "stream": False}
    assert is_summary(quiet.post("/v1/responses", **beyond).json()["output"][0])
    below = asked | {"context_management": [edit | {"compact_threshold": 1000}], "input": HI}
    assert [item["type"] for item in quiet.post("/v1/responses", **below).json()["output"]] == ["message"]
    for wrong in ({"type": "clear"}, {"type": "compaction", "compact_threshold": 0}):
        found = quiet.post("/v1/responses", **asked | {"context_management": [wrong]})
        assert (found.status_code, found.json()["error"]["param"][:18]) == (400, "context_management")


# What counts a prompt.


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS[:3]}, {"tools": TOOLS[:3], "tool_choice": "none"}])
def test_tokens_are_those_of_the_request(client, options):
    options = options | {"model": NAME, "input": INPUT, "instructions": "Be brief."}
    used = client.responses.create(**options, max_output_tokens=1).usage.input_tokens
    assert client.responses.input_tokens.count(**options).input_tokens == used


def test_tokens_of_a_prompt_that_does_not_fit_are_counted(quiet):
    capacity = quiet.serving.capacity
    assert tokens(quiet, [{"role": "user", "content": "word " * capacity}]) > capacity
    assert quiet.post("/v1/responses/input_tokens", input=HI, model="other").status_code == 404


# Tools that the conversation brings.


def search_output(*tools) -> dict:
    return {"type": "tool_search_output", "call_id": "s", "execution": "client", "status": "completed", "tools": tools}


@pytest.mark.parametrize("kind", ["tool_search_output", "additional_tools"])
def test_tools_of_the_conversation_can_be_called(client, quiet, kind):
    call = {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"query": "docs"}}
    namespace = {**TOOLS[2], "description": None}
    items = [*HI, call, search_output(namespace, TOOLS[0], TOOLS[1], {"type": "web_search"})]
    if kind == "additional_tools":
        items[1:] = [{"type": kind, "role": "developer", "tools": [namespace]}]
    options = {"max_output_tokens": 100, "model": NAME, "extra_body": {"chat_template_kwargs": OFF}}
    choice = {"type": "function", "name": "mcp__docs__search"}
    found = client.responses.create(**options, input=items, tool_choice=choice, tools=TOOLS[:1])
    (done,) = found.output
    assert (done.type, done.namespace, done.name) == ("function_call", "mcp__docs", "search")
    # In a later turn of the server's conversation, too.
    output = {"type": "function_call_output", "call_id": done.call_id, "output": "ok"}
    later = client.responses.create(**options, input=[output], previous_response_id=found.id, tool_choice=choice)
    assert later.output[0].name == "search"
    kinds = [i.type for i in client.responses.input_items.list(later.id, order="asc")]
    assert kinds[1:] == [
        *(["function_call"] * (len(items) - 2)),
        items[-1]["type"],
        "function_call",
        "function_call_output",
    ]
    # Not once the conversation is gone.
    wrong = quiet.post("/v1/responses", input=HI, tools=TOOLS[:1], tool_choice=choice)
    assert wrong.status_code == 400


def test_tools_of_the_conversation_outlast_a_summary(quiet):
    added = {"type": "additional_tools", "role": "developer", "tools": TOOLS[2:3]}
    edit = {"context_management": [{"type": "compaction", "compact_threshold": 20}]}
    choice = {"tool_choice": {"type": "function", "name": "mcp__docs__search"}, "max_output_tokens": 60}
    body = BODY | {"tools": TOOLS[:1], "store": True} | choice
    found = quiet.post("/v1/responses", **body | edit | {"input": [added, *HI]})
    assert found.status_code == 200, found.text
    summary, call = found.json()["output"]
    assert (is_summary(summary), call["name"]) == (True, "search")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    for more in (
        {"input": [added, *HI, summary, call, output]},
        {"input": [output], "previous_response_id": found.json()["id"]},
    ):
        later = quiet.post("/v1/responses", **body | more)
        assert later.status_code == 200, later.text
        assert later.json()["output"][0]["name"] == "search"


def test_tools_of_the_conversation_are_bounded_and_named(quiet):
    def param(*tools) -> str:
        found = quiet.post("/v1/responses", **TALK, input=[*HI, search_output(*tools)], max_output_tokens=1)
        return found.status_code == 400 and found.json()["error"]["param"]

    assert param({"type": "magic", "name": "x"}) == "input[1].tools[0].type"
    assert param(TOOLS[0], {"type": "function"}) == "input[1].tools[1].name"
    for wrong in (5, None, [], "x", {}, {"type": "function", "name": "f", "parameters": 5}):
        assert param(wrong) == "input[1].tools[0]"
    assert param(*({"type": "function", "name": f"f{i}"} for i in range(200))) == "tools"
    # One of a name, the first.
    tools = Tools.of([ResponsesTool(**tool) for tool in TOOLS])
    before = list(tools.functions)
    for tool in TOOLS * 50:
        tools.add(tool | {"description": "Other."}, "")
    assert tools.functions == before


# Errors as Codex reads them.


def test_a_prompt_that_does_not_fit_ends_a_stream_with_its_code(quiet):
    long = [{"role": "user", "content": "word " * 2 * quiet.serving.capacity}]
    found = events(quiet, input=long)
    assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.failed"]
    assert [event["sequence_number"] for event in found] == [0, 1, 2]
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "context_length_exceeded"
    whole = quiet.post("/v1/responses", input=long)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")
    # Other errors of a request are a status of a stream, too.
    wrong = quiet.post("/v1/responses", input=HI, stream=True, tools=[{"type": "magic"}])
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, 400)


@pytest.mark.parametrize(
    ("error", "code", "right"),
    [
        (QueueFullError("the queue is full"), "rate_limit_exceeded", "the queue is full: try again in 1s"),
        (UnavailableError("it restarts"), "server_error", "no requests are taken: it restarts: try again in 1s"),
        (EngineError("lost"), "server_error", "the engine failed: lost"),
        (TooLongError("too long"), "context_length_exceeded", "too long"),
        (InputError("wrong"), "invalid_prompt", "wrong"),
    ],
)
def test_an_error_inside_a_stream_has_a_code(quiet, monkeypatch, error, code, right):
    """Codex waits as long as the message of a full queue says, and ends for a prompt that is wrong."""

    async def pieces(*_):
        current().submitted.set()
        raise error
        yield

    monkeypatch.setattr(quiet.serving, "pieces", pieces)
    found = events(quiet, input=HI)
    assert [event["type"] for event in found] == ["response.created", "response.in_progress", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": code, "message": right}


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limit_exceeded"), (503, 503)])
def test_an_error_that_ends_says_when(status, code):
    error = ApiError(status, "the queue is full")
    assert error.body["error"]["code"] == code
    assert error.body["error"]["message"] == "the queue is full: try again in 1s"
    assert ApiError(status, f"conversation 1: {error.message}").message == f"conversation 1: {error.message}"
    assert error.headers == {"Retry-After": "1"}


def test_more_new_tokens_than_there_is_room_for_end_where_the_context_does(quiet):
    answer = quiet.post("/v1/responses", **BODY | {"input": HI, "max_output_tokens": 10**6, "temperature": 0.9})
    assert answer.status_code == 200, answer.text
    assert "max_tokens is 1000000" in answer.headers["x-dflash-note"]
    refused = quiet.post("/v1/responses", input=HI, max_output_tokens=10**6, truncation="auto")
    assert refused.status_code == 400
