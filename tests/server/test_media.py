"""Images and videos in requests: every form gives the library's text, and what cannot be used is refused by name."""

import asyncio
import base64
import json
import struct
import threading
import zlib

import pytest
from pydantic_core import from_json

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up import warm_up
from dflash_jax.media import data_url
from dflash_jax.server import body
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.limits import Limits
from dflash_jax.server.serving import Serving
from tests.media.encoded import clip, encoded, picture
from tests.server.both_ways import stream
from tests.server.conftest import Running, hosted, wait_until
from tests.vision_checkpoint import write_vision_checkpoint

CHAT, NEW = "/v1/chat/completions", 12
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
IMAGE, OTHER = picture(33, 50), picture(33, 50, seed=1)
PNG, OTHER_PNG = encoded(IMAGE), encoded(OTHER)
TEXT = {"type": "text", "text": "what?"}
PADS = "<|vision_start|><|image_pad|><|vision_end|>"


def as_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes = PNG, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": as_url(content), **more}}


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def bomb() -> bytes:
    """A PNG of a few bytes whose header says 100,000 by 100,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(2**20)))
        + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A server of a tiny model with a vision tower."""
    path = tmp_path_factory.mktemp("vision")
    write_vision_checkpoint(path)
    (path / "files").mkdir()
    (path / "files" / "image.png").write_bytes(PNG)
    (path / "outside.png").write_bytes(PNG)
    options = {"draft": None, "max_len": 256, "slots": 2, "limit_mm_per_prompt": {"image": 4, "video": 1}}
    llm = LLM(path, allowed_local_media_path=path / "files", **options)
    engine = llm.new_engine(llm.programs, 2, 256, max_queue=64, prefill_sizes=(16, 64), masks=True)
    warm_up(engine)
    running_engine = AsyncEngine(engine).start()
    host = hosted(llm, running_engine)
    serving = Serving(llm, in_process(host), ["tiny"])
    running = Running(serving, host)
    yield running
    running.stop()
    running_engine.stop()


def expected(server: Running, messages: list[dict]):
    """What the library says."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    return server.serving.llm.chat(messages, params, thinking=False)[0]


def answered(server: Running, messages: list[dict], **more) -> dict:
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    found = server.post(CHAT, **GREEDY, **body, **more)
    assert found.status_code == 200, found.text
    return found.json()


def refused(server: Running, messages: list[dict], **more) -> tuple[int, dict]:
    calls = server.serving.llm.encoder.calls
    found = server.post(CHAT, messages=messages, **GREEDY, **more)
    assert server.serving.llm.encoder.calls == calls
    return found.status_code, found.json()["error"]


def test_a_chat_with_an_image_is_that_of_the_library(vision):
    right = expected(vision, user({"type": "image", "image": IMAGE}, TEXT))
    found = answered(vision, user(image_part(), TEXT))
    assert found["choices"][0]["token_ids"] == right.token_ids
    assert found["prompt_token_ids"] == right.prompt_ids
    assert found["usage"]["prompt_tokens"] == len(right.prompt_ids) > 24


def test_the_pixels_count(vision):
    (one,), (other,) = (answered(vision, user(image_part(each), TEXT))["choices"] for each in (PNG, OTHER_PNG))
    assert one["token_ids"] != other["token_ids"]


@pytest.mark.parametrize("kind", ["input_image", "image"])
def test_other_forms_of_a_part_are_the_same(vision, kind):
    key = "image" if kind == "image" else "image_url"
    found = answered(vision, user({"type": kind, key: as_url(PNG)}, TEXT))
    assert found["choices"][0]["token_ids"] == answered(vision, user(image_part(), TEXT))["choices"][0]["token_ids"]


def test_several_images_a_video_and_choices_in_a_stream_and_not(vision):
    video = clip(frames=6, rate=2, height=32, width=32)
    parts = [
        image_part(),
        TEXT,
        image_part(OTHER_PNG),
        {"type": "video_url", "video_url": {"url": as_url(video)}},
        TEXT,
    ]
    library = [
        {"type": "image", "image": IMAGE},
        TEXT,
        {"type": "image", "image": OTHER},
        {"type": "video", "video": video},
    ]
    right = expected(vision, user(*library, TEXT))
    found = answered(vision, user(*parts), n=2)
    assert [choice["token_ids"] for choice in found["choices"]] == [right.token_ids] * 2
    assert found["usage"]["prompt_tokens"] == len(right.prompt_ids)
    body = {"messages": user(*parts), "chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    asked = {"stream_options": {"include_usage": True, "include_timings": True}}
    events = stream(vision, CHAT, **GREEDY, **body, **asked)
    tokens = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert tokens == right.token_ids
    timings = events[-1]["timings"]
    assert all(timings[f"media_{step}_s"] > 0 for step in ("fetch", "decode", "tower"))
    assert timings["prefill_s"] > 0


def test_metrics_have_each_step(vision):
    answered(vision, user(image_part(), TEXT))
    text = vision.http.get("/metrics").text
    for step in ("fetch", "decode", "tower"):
        (line,) = [each for each in text.splitlines() if each.startswith(f"dflash:media_{step}_seconds_count")]
        assert float(line.split()[-1]) > 0


def test_an_image_in_the_result_of_a_tool(vision):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    before = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": [image_part()]}
    found = answered(vision, [*before, result])
    assert found["prompt_token_ids"].count(vision.serving.llm.media.tokens.image) == 24
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}]
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    talk = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": blocks},
    ]
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    counted = vision.post("/v1/messages/count_tokens", messages=talk, **options).json()
    assert counted["input_tokens"] == found["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind", ["base64", "url"])
def test_anthropic_images(vision, kind):
    data = base64.b64encode(PNG).decode()
    source = (
        {"type": kind, "media_type": "image/png", "data": data}
        if kind == "base64"
        else {"type": kind, "url": as_url(PNG)}
    )
    body = {
        "messages": user({"type": "image", "source": source}, TEXT),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    right = answered(vision, user(image_part(), TEXT))
    counted = vision.post("/v1/messages/count_tokens", **body).json()
    assert counted["input_tokens"] == right["usage"]["prompt_tokens"]
    found = vision.post("/v1/messages", max_tokens=NEW, temperature=0, **body).json()
    usage = found["usage"]
    assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == counted["input_tokens"]


def test_responses_with_an_image_go_on_from_the_stored_one(vision):
    options = {"temperature": 0, "max_output_tokens": NEW, "chat_template_kwargs": {"enable_thinking": False}}
    part, text = {"type": "input_image", "image_url": as_url(PNG)}, {"type": "input_text", "text": "what?"}
    found = vision.post("/v1/responses", input=user(part, text), **options).json()
    right = answered(vision, user(image_part(), TEXT))
    assert found["usage"]["input_tokens"] == right["usage"]["prompt_tokens"]
    later = vision.post("/v1/responses", input="and?", previous_response_id=found["id"], **options)
    assert later.status_code == 200, later.text
    assert later.json()["usage"]["input_tokens"] > found["usage"]["input_tokens"]
    items = vision.http.get(f"/v1/responses/{found['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["image_url"] == as_url(PNG)
    cut = vision.post("/v1/responses", input=user(part), truncation="auto", **options)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncation")


@pytest.mark.parametrize("given", [as_url(PNG), base64.b64encode(PNG).decode(), [as_url(PNG)], {"url": as_url(PNG)}])
def test_image_data_of_generate(vision, given):
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    text = f"a {PADS} b"
    found = vision.post("/generate", text=text, image_data=given, sampling_params=params)
    assert found.status_code == 200, found.text
    prompt = {"prompt": text, "multi_modal_data": {"image": IMAGE}}
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    (right,) = vision.serving.llm.generate(prompt, greedy)
    assert found.json()["output_ids"] == right.token_ids
    assert found.json()["meta_info"]["prompt_tokens"] == len(right.prompt_ids)


def test_generate_has_images_for_each_prompt(vision):
    params = {"temperature": 0, "max_new_tokens": 1}
    body = {"text": [f"a {PADS} b", "text"], "image_data": [[as_url(PNG)], None], "sampling_params": params}
    first, second = (each["meta_info"]["prompt_tokens"] for each in vision.post("/generate", **body).json())
    assert first > second + 20


def test_a_second_turn_finds_the_image_in_the_prefix_cache_and_another_image_does_not(vision):
    vision.post("/reset_prefix_cache")
    text = "x" * 40
    first = user(image_part(), {"type": "text", "text": text})
    answered(vision, first)
    turns = [*first, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}]
    cached = answered(vision, turns)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 24
    vision.post("/reset_prefix_cache")
    answered(vision, first)
    other = [*user(image_part(OTHER_PNG), {"type": "text", "text": text}), *turns[1:]]
    assert answered(vision, other)["usage"]["prompt_tokens_details"]["cached_tokens"] < 24


def test_a_file_below_the_allowed_directory_only(vision):
    directory = vision.serving.llm.directory
    part = {"type": "image_url", "image_url": {"url": f"file://{directory}/files/image.png"}}
    assert answered(vision, user(part, TEXT))["usage"]["prompt_tokens"] > 24
    for url in (f"file://{directory}/outside.png", f"file://{directory}/files/../outside.png"):
        status, error = refused(vision, user({"type": "image_url", "image_url": {"url": url}}, TEXT))
        assert (status, error["param"]) == (422, "messages[0].content[0]")


WRONG = {
    "a path": ({"type": "image_url", "image_url": {"url": "/etc/hosts"}}, 400),
    "a host": ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, 422),
    "an address": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, 422),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, 400),
    "no image": (image_part(b"no image"), 400),
    "a damaged image": (image_part(PNG[:200]), 400),
    "a thin image": (image_part(encoded(picture(1, 300))), 400),
    "a bomb": (image_part(bomb()), 413),
    "no URL": ({"type": "image_url"}, 400),
    "a number": ({"type": "image_url", "image_url": 5}, 400),
    "an object for a URL": ({"type": "image_url", "image_url": {"url": {}}}, 400),
    "another detail": (image_part(detail="most"), 400),
    "no video": ({"type": "video_url", "video_url": {"url": as_url(PNG)}}, 400),
    "fps of text": ({"type": "video_url", "video_url": {"url": as_url(PNG)}, "fps": "2"}, 400),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_refused_by_name_before_the_tower_runs(vision, name):
    part, status = WRONG[name]
    found, error = refused(vision, user(TEXT, part))
    assert (found, error["param"]) == (status, "messages[0].content[1]"), error
    assert error["message"].startswith("messages[0].content[1]")
    assert vision.serving.media.memory.used == 0


def test_audio_is_refused_by_its_type(vision):
    status, error = refused(vision, user({"type": "input_audio", "input_audio": {}}, image_part()))
    assert (status, error["param"]) == (400, "messages[0].content[0].type")


def test_limits_of_a_prompt(vision):
    status, error = refused(vision, user(*[image_part()] * 5, TEXT))
    assert (status, error["param"]) == (400, "messages")
    assert "5 images" in error["message"]
    status, error = refused(vision, user(*[image_part(encoded(picture(64, 64)))] * 4, TEXT))
    assert status == 400
    assert "tokens do not fit" in error["message"]
    status, error = refused(vision, user(image_part(), TEXT), truncate_prompt_tokens=-1)
    assert (status, error["param"]) == (400, "truncate_prompt_tokens")
    status, error = refused(vision, user(image_part(), {"type": "text", "text": PADS}))
    assert status == 400
    assert "image pads" in error["message"]
    assert wait_until(lambda: vision.serving.media.memory.used == 0)


def test_a_body_with_media_may_be_larger_and_others_may_not(vision, monkeypatch):
    monkeypatch.setattr(vision.serving, "limits", Limits(body_bytes=1000, media_body_bytes=10**6))
    assert len(as_url(PNG)) > 1000
    answered(vision, user(image_part(), TEXT))
    assert vision.post("/v1/completions", prompt="x" * 2000, max_tokens=1).status_code == 413
    status, _ = refused(vision, user(TEXT, {"type": "text", "text": "x" * 10**6}))
    assert status == 413


def test_a_body_that_only_media_may_have_is_parsed_by_the_fast_parser(vision, monkeypatch):
    monkeypatch.setattr(vision.serving, "limits", Limits(body_bytes=1000, media_body_bytes=10**6))
    parsed = []
    monkeypatch.setattr(body, "from_json", lambda content: parsed.append(len(content)) or from_json(content))
    answered(vision, user(image_part(), TEXT))
    answered(vision, user(TEXT))
    assert len(parsed) == 1
    headers = {"Content-Type": "application/json"}
    found = vision.http.post(CHAT, content=b'{"messages": "' + b"x" * 2000, headers=headers)
    assert found.status_code == 400
    assert found.json()["error"]["message"].startswith("the body is not JSON")
    found = vision.http.post(CHAT, content=b'{"messages": "' + b"\\/" * 2000 + b'"}', headers=headers)
    assert found.status_code == 413


HIDDEN = "x" * 2000
TEXTS = {
    "a part": {"messages": user(image_part(), {"type": "text", "text": HIDDEN})},
    "text beyond ASCII in a URL": {"messages": user({"type": "image_url", "image_url": {"url": "é" * 2000}})},
    "arguments of a call": {
        "messages": [
            *user(image_part()),
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"url": HIDDEN}}}]},
        ]
    },
    "a tool": {
        "messages": user(image_part()),
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"url": HIDDEN}}}],
    },
    "variables of the template": {
        "messages": user(image_part()),
        "chat_template_kwargs": {"messages": {"url": HIDDEN}},
    },
    "a name": {"messages": user(image_part()), HIDDEN: 1},
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_limited_as_in_a_body_without_media(vision, monkeypatch, name):
    """Before anything renders or tokenises it, wherever it is."""
    limits = vision.serving.limits
    monkeypatch.setattr(vision.serving, "limits", Limits(body_bytes=1000, media_body_bytes=10**6))
    monkeypatch.setattr(vision.serving.templates, "render", None)
    found = vision.post(CHAT, **TEXTS[name], max_tokens=1)
    assert found.status_code == 413, found.text
    assert found.json()["error"]["message"] == "the body has more than 1000 bytes beside its images and videos"
    monkeypatch.setattr(vision.serving, "limits", limits)
    assert vision.post(CHAT, **TEXTS[name], max_tokens=1).status_code != 413


URL = as_url(PNG)
FORMS = [
    {"messages": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": URL}}]}]},
    {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image", "source": {"url": URL}}]}]}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": URL}]}]},
    {"image_data": URL},
    {"image_data": [[URL, {"url": URL}], None], "video_data": [URL]},
]


@pytest.mark.parametrize("given", FORMS)
def test_images_and_videos_are_no_text(given):
    assert body.text_bytes(given) < 100


def test_text_counts_at_least_its_bytes():
    given = {"input": ["é漢😀", {"é": ["x", 5, None, [["y"]]]}], "url": "x", "image_data": ["é" * 9, "x" * 9]}
    assert len(json.dumps(given, ensure_ascii=False).encode()) < body.text_bytes(given) + 120
    assert body.text_bytes(given) == 5 + 3 * 4 + 4 + 1 + 1 + 3 + 1 + 10 + 9 * 4


def test_the_server_decodes_no_base64(vision, monkeypatch):
    """It would take the interpreter from all streams."""
    monkeypatch.setattr(data_url, "decoded", None)
    answered(vision, user(image_part(encoded(picture(30, 40, seed=7))), TEXT))
    found = vision.post(CHAT, messages=user({"type": "image_url", "image_url": {"url": "data:;base64,A=AA"}}))
    assert found.status_code == 400
    assert "base64 is malformed" in found.json()["error"]["message"]


def test_a_large_body_is_not_copied():
    given = b"x" * 10**6

    async def receive():
        return {"type": "http.request", "body": given, "more_body": False}

    request = body.MediaRequest({"type": "http"}, receive)
    assert asyncio.run(request.body()) is given


def test_text_is_that_of_today(vision, monkeypatch):
    seen = []
    render = vision.serving.templates.render
    monkeypatch.setattr(vision.serving.templates, "render", lambda *a, **k: seen.append(a[0]) or render(*a, **k))
    answered(vision, user(TEXT, TEXT))
    answered(vision, user(TEXT, image_part()))
    assert seen[0] == [{"role": "user", "content": "what?what?"}]
    assert seen[1][0]["content"] == [TEXT, {"type": "image"}]


def test_a_rendered_chat_has_all_pads_and_does_not_run_the_tower(vision):
    expected = answered(vision, user(TEXT, image_part()))["prompt_token_ids"]
    calls = vision.serving.llm.encoder.calls
    # Another image, whose rows are not cached.
    messages = user(TEXT, image_part(encoded(picture(33, 50, seed=5))))
    found = vision.post(f"{CHAT}/render", messages=messages, chat_template_kwargs={"enable_thinking": False})
    assert found.json()["token_ids"] == expected
    assert vision.serving.llm.encoder.calls == calls


def test_a_model_of_text_refuses_images_and_has_no_larger_bodies(server):
    found = server.post(CHAT, messages=user(image_part()))
    assert found.status_code == 400
    assert "only text is possible" in found.json()["error"]["message"]
    assert server.post("/generate", text="x", image_data=as_url(PNG)).json()["error"]["param"] == "image_data"
    assert server.serving.most_body_bytes(CHAT) == server.serving.limits.body_bytes


def test_a_stream_goes_on_while_the_tower_runs(vision, monkeypatch):
    """The tower waits for the end of another request's stream."""
    encoder, ended = vision.serving.llm.encoder, threading.Event()
    encode = encoder.encode

    def held(media):
        assert ended.wait(120)
        return encode(media)

    monkeypatch.setattr(encoder, "encode", held)
    found = []
    asking = threading.Thread(target=lambda: found.append(answered(vision, user(image_part(OTHER_PNG), TEXT))))
    asking.start()
    assert wait_until(lambda: vision.serving.in_flight == 1)
    events = stream(vision, CHAT, messages=user(TEXT), **GREEDY)
    assert events
    assert not found
    ended.set()
    asking.join()
    assert found


def test_a_client_that_leaves_ends_its_work(vision, monkeypatch):
    decoder, began, cancelled = vision.serving.media.decoder, threading.Event(), threading.Event()

    async def endless(*_):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    monkeypatch.setattr(decoder, "decode", endless)
    calls = vision.serving.llm.encoder.calls

    async def leave():
        import httpx

        async with httpx.AsyncClient(base_url=vision.url, timeout=120) as client:
            task = asyncio.create_task(client.post(CHAT, json={"messages": user(image_part(), TEXT)}))
            assert await asyncio.to_thread(began.wait, 120)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert cancelled.wait(120)
    assert vision.idle()
    assert wait_until(lambda: vision.serving.media.memory.used == 0)
    assert vision.serving.llm.encoder.calls == calls


def test_memory_is_returned_for_pixels_and_then_for_rows(vision, monkeypatch):
    media, tower, used, clients = vision.serving.media, vision.host.tower, [], set()
    encode, begin = tower.encode, vision.host.engine.engine.submit

    async def watched(client, prompt_media):
        clients.add(client)
        used.append((media.memory.used, tower.memory.used))
        return await encode(client, prompt_media)

    def begins(request, **options):
        assert wait_until(lambda: not media.memory.used)
        used.append((media.memory.used, tower.memory.used))
        return begin(request, **options)

    monkeypatch.setattr(tower, "encode", watched)
    monkeypatch.setattr(vision.host.engine.engine, "submit", begins)
    answered(vision, user(image_part(), TEXT))
    # Pixels, then 24 rows of 36 numbers in float32.
    assert used == [(32 * 48 * 3, 0), (0, 24 * 36 * 4)]
    assert clients == {"127.0.0.1"}
    assert wait_until(lambda: media.memory.used == tower.memory.used == 0)


def test_rows_without_memory_are_refused_and_a_tower_that_fails_keeps_none(vision, monkeypatch):
    media, tower, part = vision.serving.media, vision.host.tower, image_part(encoded(picture(33, 50, seed=8)))
    with monkeypatch.context() as patch:
        patch.setattr(tower.memory, "most", 24 * 36 * 4)
        status, error = refused(vision, user(part, TEXT))
        assert (status, "the memory for rows" in error["message"]) == (429, True)

    def fails(media):
        raise RuntimeError("the device failed")

    monkeypatch.setattr(vision.serving.llm.encoder, "encode", fails)
    assert vision.post(CHAT, messages=user(part, TEXT), **GREEDY).status_code == 500
    assert wait_until(lambda: media.memory.used == tower.memory.used == 0)


def test_several_prompts_of_a_request_do_not_wait_for_one_another(vision, monkeypatch):
    """Each may read what one client may have at a time."""
    monkeypatch.setattr(vision.serving.media, "_bytes", lambda part: 2**31)
    talks = [user(image_part(), TEXT), user(image_part(OTHER_PNG), TEXT)]
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    assert len(vision.post(f"{CHAT}/batch", messages=talks, **GREEDY, **body).json()["choices"]) == 2


def test_many_images_wait_for_the_decoder(vision, monkeypatch):
    decoder, running = vision.serving.media.decoder, []
    decode = decoder.decode

    async def counted(*arguments):
        running.append(None)
        try:
            assert len(running) <= decoder.limits.decodes
            return await decode(*arguments)
        finally:
            running.pop()

    monkeypatch.setattr(decoder, "decode", counted)
    found = answered(vision, user(*[image_part(encoded(picture(16, 16, seed=i))) for i in range(4)], TEXT))
    assert found["choices"]


def test_a_batch_of_conversations_has_media(vision):
    talks = [user(image_part(), TEXT), user(TEXT)]
    body = {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
    found = vision.post(f"{CHAT}/batch", messages=talks, **GREEDY, **body).json()
    assert [c["token_ids"] for c in found["choices"]] == [answered(vision, t)["choices"][0]["token_ids"] for t in talks]
