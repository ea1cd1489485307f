"""Sessions of agents' clients, in the shapes that they send: all are answered, and each turn prefills what is new.

The shapes are those of Claude Code 2.1, Codex 0.171, opencode 1.18, qwen-code, Cline, aider, Zed and of the AI SDK; the
texts are ours. The template is of Qwen's kind: it refuses late system messages and unknown efforts, and drops the
thoughts before the last message of the user, unless they are to be preserved.
"""

import copy
import json

import pytest

from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.messages_input import sealed
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, TOOL, Running

QWEN = r"""
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{{- '<|im_start|>system\n' + first }}
{%- for tool in tools or [] %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- set last = namespace(place=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.place = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if last.place < 0 %}{{- raise_exception('No user query found.') }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if preserve_thinking or loop.index0 > last.place %}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + (value | string) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{- raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if reasoning_effort is defined and reasoning_effort not in ('low', 'medium', 'xhigh') %}
{{- raise_exception('Unknown effort.') }}
{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""

RULES = "You change code with the given tools. Read before you edit, keep changes small, and run the tests at the end. "
# Answers are shorter than what clients ask for, and always the same.
SHORT = {"max_tokens": 6, "temperature": 0, "block_size": 1}


@pytest.fixture(scope="module")
def agents(llm, server):
    """The server with a template of Qwen's kind."""
    other = copy.copy(llm)
    other.tokenizer = Tokenizer(TINY / "target", QWEN)
    running = Running(Serving(other, in_process(server.host), ["tiny"]), server.host)
    yield running
    running.stop()


def parameters(*names: str) -> dict:
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": [*names]}


def text(words: str, **more) -> dict:
    return {"type": "text", "text": words} | more


# Claude Code: /v1/messages

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def claude_tool(name: str, *names: str, **more) -> dict:
    return {"name": name, "description": f"{name}: does it.", "input_schema": parameters(*names)} | more


def claude_code() -> list[dict]:
    """Its header changes with each request, system messages come late, and a tool is loaded when it is searched."""
    tools = [
        claude_tool("Bash", "command", eager_input_streaming=True),
        claude_tool("Read", "path"),
        claude_tool("ToolSearch", "query"),
        claude_tool("Placeholder", defer_loading=True),
    ]
    late = claude_tool("Fetch", "url", defer_loading=True)
    environment = "The directory is /work.\n"
    turns = [{"role": "user", "content": [text("<system-reminder>\nBe kind.\n</system-reminder>\n"), text("Fix it.")]}]
    calls = [("Bash", {"command": "ls"}, "a.py"), ("ToolSearch", {"query": "fetch"}, None)]
    bodies = []
    for i, (name, arguments, result) in enumerate([*calls, (None, {}, None)]):
        system = [
            text(f"x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli; cch={i * 7919:05x};"),
            text("You are an agent.", **EPHEMERAL),
            text(RULES, **EPHEMERAL),
        ]
        # The newest system message is a list, which is a text afterwards.
        newest = {"role": "system", "content": [text(f"{environment}Turn {i}.", **EPHEMERAL)]}
        bodies.append(
            {
                "model": "tiny",
                "system": system,
                "messages": [*turns, newest],
                "tools": tools if i < 2 else [tools[0], late, *tools[1:]],
                "metadata": {"user_id": json.dumps({"session_id": f"s{i}"})},
                "thinking": {"type": "adaptive", "display": "omitted"},
                "output_config": {"effort": "high"},
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                "stream": True,
            }
        )
        content = [text(result)] if result else [{"type": "tool_reference", "tool_name": "Fetch"}]
        thought = {"type": "thinking", "thinking": "", "signature": sealed(f"Thought {i}.")}
        call = {"type": "tool_use", "id": f"toolu_{i}", "name": name, "input": arguments}
        done = {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": content, "is_error": False}
        turns = [*turns, {"role": "system", "content": f"{environment}Turn {i}."}]
        turns += [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [done]}]
    return bodies


# Codex: /v1/responses


def codex() -> list[dict]:
    tools = [
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False}
        | {"parameters": parameters("cmd")},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": True},
    ]
    said = "input_text"
    items: list[dict] = [
        {"type": "message", "role": "developer", "content": [{"type": said, "text": RULES * 4}]},
        {"type": "message", "role": "developer", "content": [{"type": said, "text": "a"}, {"type": said, "text": "b"}]},
        {"type": "message", "role": "user", "content": [{"type": said, "text": "<environment/>"}]},
        {"type": "message", "role": "user", "content": [{"type": said, "text": "Fix it."}]},
    ]
    steps = [
        [
            {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        [
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ],
    ]
    bodies = []
    for i in range(3):
        more = {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}}
        more |= {"store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}
        bodies.append({"model": "tiny", "input": items, "client_metadata": {"turn": str(i)}, **more})
        if i < 2:
            thought = {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": f"Step {i}."}],
            }
            items = [*items, thought, *steps[i]]
    return bodies


# The others: /v1/chat/completions


def chat_tool(name: str, *names: str, **more) -> dict:
    return {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": parameters(*names)} | more,
    }


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def tool_loop(first: list[dict], thinks: str | None = "reasoning_content", **fields) -> list[dict]:
    """Three turns of a chat: a command, a look at a file, and the end."""
    steps, messages, bodies = [("bash", {"command": "ls"}), ("read", {"path": "a.py"})], first, []
    for i, (name, arguments) in enumerate([*steps, ("", {})]):
        bodies.append({"model": "tiny", "messages": messages, **STREAM, **fields})
        call = {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]} | ({thinks: "Hm."} if thinks else {})
        messages = [*messages, said, {"role": "tool", "tool_call_id": f"call_{i}", "content": "x = 1\n" * 3}]
    return bodies


def opencode() -> list[dict]:
    """Two system messages, and 32,000 tokens for any model."""
    first = [{"role": "system", "content": RULES * 4}, {"role": "system", "content": "Here is the environment."}]
    tools = [chat_tool("bash", "command"), chat_tool("read", "path")]
    more = {"temperature": 0.55, "top_p": 1, "max_tokens": 32000, "tools": tools, "tool_choice": "auto"}
    return tool_loop([*first, {"role": "user", "content": "Fix it."}], **more)


def qwen_code() -> list[dict]:
    """DashScope's fields, marks for its cache, and another id of the prompt in each turn."""
    first = [
        {"role": "system", "content": [text(RULES * 4, **EPHEMERAL)]},
        {"role": "user", "content": [text("Fix it."), text("Please.", **EPHEMERAL)]},
    ]
    tools = [chat_tool("bash", "command"), chat_tool("read", "path") | EPHEMERAL]
    more = {"preserve_thinking": True, "vl_high_resolution_images": True, "enable_search": False, "tools": tools}
    bodies = tool_loop(first, **more, reasoning_effort="max", max_tokens=8000)
    return [body | {"metadata": {"sessionId": "s", "promptId": f"p{i}"}} for i, body in enumerate(bodies)]


def ai_sdk() -> list[dict]:
    first = [{"role": "system", "content": RULES * 4}, {"role": "user", "content": "Fix it."}]
    tools = [chat_tool("bash", "command", strict=True), chat_tool("read", "path")]
    more = {"user": "u", "seed": 1, "reasoning_effort": "high", "verbosity": "low", "tools": tools}
    return tool_loop(first, **more, tool_choice="auto", stop=["<end>"])


def zed() -> list[dict]:
    first = [{"role": "system", "content": RULES * 4}, {"role": "user", "content": [text("Fix it.")]}]
    tools = [chat_tool("bash", "command"), chat_tool("read", "path")]
    more = {"max_completion_tokens": 4096, "parallel_tool_calls": False, "prompt_cache_key": "k", "tools": tools}
    return tool_loop(first, **more, temperature=1.0, tool_choice="auto")


def cline() -> list[dict]:
    """Tools in XML, which are text for the server."""
    messages, bodies = [{"role": "system", "content": RULES * 4}], []
    for i in range(3):
        result = "[read_file for 'a.py'] Result:" if i else "<task>\nFix it.\n</task>"
        parts = [text(result), text(f"<environment_details>\nTime {i}\n</environment_details>")]
        messages = [*messages, {"role": "user", "content": parts}]
        bodies.append({"model": "tiny", "messages": messages, "temperature": 0, "reasoning_effort": "medium", **STREAM})
        read = "<read_file>\n<path>a.py</path>\n</read_file>"
        messages = [*messages, {"role": "assistant", "content": f"I read it.\n\n{read}"}]
    return bodies


def aider() -> list[dict]:
    """Texts only: examples, the files as they are now, and the newest request."""
    system = {"role": "system", "content": [text(RULES * 4, **EPHEMERAL)]}
    examples = [{"role": "user", "content": "Change x."}, {"role": "assistant", "content": "a.py\n<<<<<<< SEARCH"}]
    done, bodies = [], []
    for i in range(3):
        files = [{"role": "user", "content": [text(f"The files:\nx = {i}", **EPHEMERAL)]}]
        files += [{"role": "assistant", "content": "Ok."}]
        asked = {"role": "user", "content": f"Request {i}."}
        more = {"temperature": 0, "stream": True, "num_ctx": 8192, "reasoning_effort": "low", "stop": ["<end>"]}
        bodies.append({"model": "tiny", "messages": [system, *examples, *done, *files, asked], **more})
        done = [*done, asked, {"role": "assistant", "content": "Done."}]
    # An answer that its limit cut goes on.
    cut = {"role": "assistant", "content": "a.py\n<<<<<<< SEA", "prefix": True}
    return [*bodies, bodies[-1] | {"messages": [*bodies[-1]["messages"], cut]}]


CHAT = "/v1/chat/completions"
SESSIONS = {
    "Claude Code": ("/v1/messages", claude_code),
    "Codex": ("/v1/responses", codex),
    "opencode": (CHAT, opencode),
    "qwen-code": (CHAT, qwen_code),
    "the AI SDK": (CHAT, ai_sdk),
    "Zed": (CHAT, zed),
    "Cline": (CHAT, cline),
    "aider": (CHAT, aider),
}
# Sessions whose turns only add to the conversation.
GROWING = ("Claude Code", "Codex", "opencode", "qwen-code", "the AI SDK", "Zed", "Cline")


def streamed(server: Running, path: str, body: dict) -> list[dict]:
    """The events of an answer."""
    short = dict(SHORT)
    for name in ("max_completion_tokens", "max_output_tokens"):
        if name in body or (path, name) == ("/v1/responses", "max_output_tokens"):
            short[name] = short.pop("max_tokens")
    with server.http.stream("POST", path, json=body | short) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check_messages(events: list[dict]) -> tuple[int, int]:
    """What Claude Code reads of a stream; (tokens of the prompt, of which cached)."""
    first, *blocks, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    for usage in (first["message"]["usage"], delta["usage"]):
        assert all(isinstance(usage[name], int) for name in names)
    assert delta["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    place = -1
    for event in blocks:
        place += event["type"] == "content_block_start"
        assert event["index"] == place
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


def check_responses(events: list[dict]) -> tuple[int, int]:
    assert [event["type"] for event in events[:1]] == ["response.created"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    usage = events[-1]["response"]["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def check_chat(events: list[dict], has_usage: bool = True) -> tuple[int, int]:
    chunks = events[:-1] if has_usage else events
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] is not None for choice in deltas] == [False] * (len(deltas) - 1) + [True]
    assert all(isinstance(call["index"], int) for c in deltas for call in c["delta"].get("tool_calls") or ())
    if not has_usage:
        return 0, 0
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_is_answered_and_prefills_what_is_new(agents, name):
    """At least 95 % of the last turn's prompt is restored."""
    agents.post("/reset_prefix_cache")
    path, session = SESSIONS[name]
    before = 0
    for i, body in enumerate(session()):
        events = streamed(agents, path, body)
        if path == "/v1/messages":
            prompt, cached = check_messages(events)
        elif path == "/v1/responses":
            prompt, cached = check_responses(events)
        else:
            prompt, cached = check_chat(events, "stream_options" in body)
        if name in GROWING and i:
            assert cached >= 0.95 * before, (i, cached, before)
        before = prompt


# First requests of frameworks that have no session of their own here.
FRAMEWORKS = {
    "pydantic-ai": {
        "n": 1, "stream": False, "max_completion_tokens": 4, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [TOOL], "seed": 1, "logit_bias": {}, "service_tier": "auto", "store": False, "user": "u",
        "prediction": {"type": "content", "content": "x"}, "verbosity": "low", "reasoning_effort": "low",
    },
    "openai-agents": {
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "store": True, "metadata": {"a": "b"},
        "reasoning_effort": "minimal", "verbosity": "medium", "prompt_cache_retention": "24h", "max_tokens": 4,
    },
    "LiteLLM": {
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "user": "u", "max_tokens": 4,
        "stream_options": {"include_usage": True}, "metadata": {"tags": ["x"]}, "safety_identifier": "s",
    },
    "OpenRouter's clients": {
        "usage": {"include": True}, "provider": {"order": ["x"]}, "transforms": [], "models": ["tiny", "other"],
        "reasoning": {"effort": "high", "exclude": False, "summary": "auto"}, "session_id": "s", "max_tokens": 4,
    },
    "llama.cpp's clients": {
        "cache_prompt": True, "id_slot": -1, "timings_per_token": True, "return_progress": True, "n_keep": 0,
        "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "dry_multiplier": 0, "dry_base": 1.75,
        "dry_sequence_breakers": ["\n"], "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64,
        "repeat_penalty": 1, "dynatemp_range": 0, "reasoning_format": "auto", "max_tokens": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_fields_of_frameworks_are_taken(agents, name):
    found = agents.post(CHAT, model="tiny", messages=MESSAGES, **FRAMEWORKS[name])
    assert found.status_code == 200, found.text
