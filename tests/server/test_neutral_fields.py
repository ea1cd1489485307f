"""Fields of other servers that do nothing here: taken at their neutral values, refused by name at others."""

import json
import pickle

import pytest
from pydantic import ValidationError

from dflash_jax.server import chat_schema, messages_input, native, responses_input, schema, schema_base
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.limits import Limits
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, Running, posted

BODIES = {
    "/v1/chat/completions": (chat_schema.ChatRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/completions": (schema.CompletionRequest, {"prompt": "def f(", "max_tokens": 4}),
    "/v1/responses": (responses_input.ResponsesRequest, {"input": "hi", "max_output_tokens": 4}),
    "/v1/messages": (messages_input.MessagesRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/generate": (native.GenerateRequest, {"text": "def f(", "sampling_params": {"max_new_tokens": 4}}),
    "sampling_params": (native.NativeSampling, {"max_new_tokens": 4}),
    "/tokenize": (chat_schema.TokenizeRequest, {"prompt": "def f("}),
    "/detokenize": (schema.DetokenizeRequest, {"tokens": [5]}),
}
CASES = [(path, name) for path, (model, _) in BODIES.items() for name in model.neutral]
VALUES = (True, False, 0, 1, 7, -1, 1.0, 2.5, "", "x", [], ["x"], ["text"], [[]], {}, {"x": 1})
ANY = schema_base.ANY


def url(path: str, body: dict) -> tuple[str, dict]:
    """Where a body is posted, and as what."""
    return ("/generate", {"text": "def f(", "sampling_params": body}) if path == "sampling_params" else (path, body)


def test_tables_have_values_or_any():
    for table in schema_base._TABLES.values():
        for values in table.values():
            assert values == ANY or (isinstance(values, list) and not any(str(value)[:1] == "<" for value in values))


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_does_something_is_in_no_table(path):
    model, _ = BODIES[path]
    assert not set(model.neutral) & set(model.model_fields)


@pytest.mark.parametrize(("path", "name"), CASES)
def test_neutral_values_are_taken_and_no_others(path, name):
    model, body = BODIES[path]
    allowed = model.neutral[name]
    accepted = [None, *(VALUES if allowed == ANY else allowed)]
    for value in accepted:
        assert model.model_validate(body | {name: value}) == model.model_validate(body), value
    refused = [value for value in VALUES if not schema_base.is_neutral(allowed, value)]
    assert bool(refused) == (allowed != ANY)
    for value in refused:
        with pytest.raises(ValidationError) as failure:
            model.model_validate(body | {name: value})
        assert failure.value.errors()[0]["ctx"]["field"] == name


@pytest.mark.parametrize(
    ("allowed", "value", "is_neutral"),
    [
        ((False,), False, True),
        ((False,), 0, False),
        ((0,), False, False),
        ((1,), 1.0, True),
        ((1,), True, False),
        (ANY, True, True),
        ((), None, True),
        (([],), {}, False),
    ],
)
def test_values_are_told_apart_by_kind(allowed, value, is_neutral):
    assert schema_base.is_neutral(allowed, value) is is_neutral


@pytest.mark.parametrize("path", BODIES)
def test_all_of_them_at_once_over_http(quiet, path):
    model, body = BODIES[path]
    for example in (None, {"x": [1]}):
        more = {
            name: example if allowed == ANY else allowed[0] if example and allowed else None
            for name, allowed in model.neutral.items()
        }
        where, sent = url(path, body | more)
        found = quiet.post(where, **sent)
        assert found.status_code == 200, found.text


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
def test_refused_by_name_over_http(quiet, path):
    model, body = BODIES[path]
    name = next(name for name, allowed in model.neutral.items() if allowed != ANY)
    where, sent = url(path, body | {name: ["x"]})
    found = quiet.post(where, **sent)
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"] == (f"sampling_params.{name}" if path == "sampling_params" else name)
    assert error["message"].startswith(f"{error['param']} ")


def test_the_reason_says_what_is_possible(quiet):
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, use_beam_search=True)
    assert found.json()["error"]["message"] == "use_beam_search is not supported: only false is possible"


class Exploit:
    """What unpickling it would do is seen."""

    ran = False

    def __reduce__(self):
        return setattr, (Exploit, "ran", True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"])
@pytest.mark.parametrize("form", [str, lambda text: [text], lambda text: json.dumps({"callable": text})])
def test_a_clients_program_is_refused_and_never_read(lax, quiet, path, form):
    """In SGLang's forms, also where unknown fields are let through, and through SageMaker's path."""
    program = form(pickle.dumps(Exploit()).hex())
    for server, where in ((quiet, path), (lax, path), (quiet, "/invocations")):
        found = server.post(where, **BODIES[path][1], custom_logit_processor=program)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, "custom_logit_processor")
        assert error["message"].startswith("custom_logit_processor is refused: it is a pickled program")
    assert not Exploit.ran
    assert quiet.post(path, **BODIES[path][1], custom_logit_processor=None).status_code == 200


# As the routers of SGLang fill them in, whatever their client said.
ROUTED = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "tiny",
        "logprobs": False,
        "stream": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
        "return_hidden_states": False,
        "max_completion_tokens": 4,
    },
    "/v1/completions": {
        "model": "tiny",
        "prompt": "def f(",
        "echo": False,
        "stream": False,
        "no_stop_trim": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "return_hidden_states": False,
        "max_tokens": 4,
    },
    "/v1/responses": {
        "background": False,
        "input": "hi",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": True,
        "stream": False,
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "request_id": "resp_0123456789abcdef",
        "priority": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_output_tokens": 4,
    },
    "/generate": {
        "text": "def f(",
        "model": "unknown",
        "sampling_params": {"max_new_tokens": 4, "skip_special_tokens": True, "no_stop_trim": False},
        "return_logprob": False,
        "stream": False,
        "log_metrics": True,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
        "return_hidden_states": False,
        "return_routed_experts": False,
        "lora_path": None,
    },
}


@pytest.mark.parametrize("path", ROUTED)
def test_fields_that_routers_send_are_accepted(quiet, path):
    found = quiet.post(path, **ROUTED[path])
    assert found.status_code == 200, found.text
    if "request_id" in ROUTED[path]:
        assert found.json()["id"] == ROUTED[path]["request_id"]


def test_unknown_keys_inside_messages_parts_and_tools_change_nothing(quiet, llm):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    plain = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 8}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "bold": True}
    message = {"role": "user", "content": [part], "mood": {"x": 1}, "reasoning_details": [], "audio": None}
    odd = {"type": "function", "function": tool["function"] | {"color": 1}, "cache_control": {"type": "ephemeral"}}
    asked = [plain, {"messages": [message], "tools": [odd], "max_tokens": 8.0}]
    texts = [quiet.post("/v1/chat/completions", **body).json()["choices"][0]["message"] for body in asked]
    assert texts[0] == texts[1]


def test_a_refusal_is_the_assistants_text(quiet, llm):
    said = [
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    body = {"max_tokens": 2, "return_token_ids": True}
    prompts = []
    for message in said:
        found = quiet.post("/v1/chat/completions", messages=[*MESSAGES, message, *MESSAGES], **body)
        prompts.append(found.json()["prompt_token_ids"])
    assert prompts[0] == prompts[1] == prompts[2]


@pytest.fixture
def lax(llm, quiet):
    """The same engine behind a server that lets unknown fields through."""
    serving = Serving(llm, in_process(quiet.host), ["tiny"], Limits(unknown_fields="warn"))
    running = Running(serving, quiet.host)
    yield running
    running.stop()


def test_unknown_fields_may_be_let_through_with_a_note(lax, quiet, caplog):
    body = {"messages": MESSAGES, "max_tokens": 4, "best_guess": 1, "\ud800": 2}
    found = posted(lax, "/v1/chat/completions", body)
    assert found.status_code == 200, found.text
    assert found.headers["x-dflash-note"] == r"unknown fields, left out: best_guess, \ud800"
    assert found.headers["x-dflash-note"] in caplog.text
    # A known field at a value that is not neutral stays an error, and so does an unknown one of an object inside.
    assert lax.post("/v1/chat/completions", messages=MESSAGES, use_beam_search=True).status_code == 400
    assert lax.post("/v1/chat/completions", messages=MESSAGES, stream_options={"x": 1}).status_code == 400
    found = lax.post("/generate", text="x", sampling_params={"max_new_tokens": 2, "guess": 1})
    assert (found.status_code, found.headers["x-dflash-note"]) == (200, "unknown fields, left out: guess")
    # The choice is the server's, not the process's.
    assert quiet.post("/v1/chat/completions", messages=MESSAGES, best_guess=1).status_code == 400


def test_tens_of_thousands_of_unknown_fields(lax, quiet):
    many = {f"{'x' * 50}{i}": i for i in range(60_000)} | {"max_tokens": 2, "prompt": "def f("}
    found = lax.post("/v1/completions", **many)
    assert found.status_code == 200
    assert len(found.headers["x-dflash-note"]) <= 300
    found = quiet.post("/v1/completions", **many)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "x" * 50 + "0")


@pytest.mark.parametrize("name", ["x" * 10**6, "\ud800", "a\r\nb", "é", ""])
def test_a_name_that_is_none_is_refused(quiet, name):
    found = posted(quiet, "/v1/completions", ({"prompt": "x", name: 1}))
    assert found.status_code == 400
    assert len(found.text) < 1000
    assert "is not supported" in found.json()["error"]["message"]
