"""New weights in a running server, by vLLM's and SGLang's names, as a trainer sends them."""

import asyncio
import base64
import json
import pickle
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.server.management import Management
from tests.server.conftest import wait_until

PROMPT = [40, 41, 42, 43, 44]
BYTES = {"Content-Type": "application/octet-stream"}
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def other(tmp_path_factory, managed_server):
    """A directory with another head, of the same numbers; the tensor; and an LLM of it."""
    own = managed_server.host.llm.directory
    path = tmp_path_factory.mktemp("other") / "target"
    shutil.copytree(own, path)
    files = TensorFiles(own)
    tensors = {name: np.array(files.read(name)) for name in files}
    tensors[HEAD] = np.roll(tensors[HEAD], 7, axis=0)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, {HEAD: tensors[HEAD]}, LLM(str(path), None, slots=1)


def tokens_of(running, prompt=PROMPT, count=12, **fields) -> dict:
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True} | fields
    found = running.post("/inference/v1/generate", token_ids=prompt, sampling_params=sampling)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def expected(llm, prompt=PROMPT, count=12) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return llm.generate([prompt], params, block_size=1)[0].token_ids


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def by_disk(running, path, tensors):
    return running.post("/update_weights_from_disk", model_path=str(path), weight_version="new", flush_cache=True)


def by_tensor(running, path, tensors):
    given = {"serialized_named_tensors": [b64(save(tensors))], "load_format": None, "weight_version": "new"}
    return running.post("/update_weights_from_tensor", **given)


def by_parts(running, path, tensors):
    parts = [{HEAD: tensors[HEAD]}, {"model.norm.weight": norm_of(running)}]
    answers = [running.post("/init_weight_transfer_engine", init_info={}), running.http.post("/start_weight_update")]
    answers += [running.http.post("/update_weights", content=save(part), headers=BYTES) for part in parts]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert version(running) == "default"
    return running.post("/finish_weight_update", weight_version="new")


def by_bytes(running, path, tensors):
    found = running.http.post("/update_weights", content=save(tensors), headers=BYTES)
    assert version(running).isdigit()
    running.post("/update_weight_version", new_version="new")
    return found


def by_info(running, path, tensors):
    found = running.post("/update_weights", update_info={"serialized_named_tensors": b64(save(tensors))})
    running.post("/update_weight_version", new_version="new")
    return found


def by_path(running, path, tensors):
    found = running.post("/update_weights", update_info={"model_path": str(path)})
    running.post("/update_weight_version", new_version="new")
    return found


def norm_of(running) -> np.ndarray:
    return TensorFiles(running.host.llm.directory).read("model.norm.weight")


def version(running) -> str:
    found = running.http.get("/weight_info").json()["weight_version"]
    assert running.http.get("/model_info").json()["weight_version"] == found
    return found


@pytest.mark.parametrize("update", [by_disk, by_tensor, by_parts, by_bytes, by_info, by_path])
def test_new_weights_give_the_tokens_of_a_model_that_began_with_them(managed, other, update):
    path, tensors, llm = other
    before = tokens_of(managed)
    assert before["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    found = update(managed, path, tensors)
    assert found.status_code == 200, found.text
    choice = tokens_of(managed)
    assert choice["token_ids"] == expected(llm) != before["token_ids"]
    assert choice["weight_versions"] == [{"version": "new", "start": 0, "end": 12}]
    meta = managed.post("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 3}).json()["meta_info"]
    assert meta["weight_version"] == version(managed) == "new"


def test_a_stream_goes_on_under_new_weights_and_says_which_drew_its_tokens(managed, other, monkeypatch):
    """What it has in caches is computed again."""
    path, tensors, llm = other
    engine, reached = managed.host.engine.engine, threading.Event()

    def step(original=engine.step):
        events = original()
        if not reached.is_set() and any(len(event.request.tokens) >= 20 for event in events):
            managed.host.llm.pause("keep")
            reached.set()
        return events

    monkeypatch.setattr(engine, "step", step)
    sampling = {"max_tokens": 300, "temperature": 0, "ignore_eos": True, "n": 2}
    asked = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True}
    ids: dict[int, list[int]] = {0: [], 1: []}
    versions = {}
    with managed.http.stream("POST", "/inference/v1/generate", json=asked) as answer:
        lines = answer.iter_lines()
        assert reached.wait(120)
        assert by_tensor(managed, path, tensors).status_code == 200
        assert managed.http.post("/resume").json() == {"status": "resumed"}
        for line in filter(None, lines):
            if line == "data: [DONE]":
                break
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            ids[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"]:
                versions[choice["index"]] = choice["weight_versions"]
    for i in (0, 1):
        old, new = versions[i]
        assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "new", 300)
        assert 20 <= old["end"] == new["start"] < 300
        begun = ids[i][: old["end"]]
        assert ids[i][old["end"] :][:100] == expected(llm, [*PROMPT, *begun], 100)


def test_abort_all_requests_ends_those_under_way(managed, other, monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        assert managed.http.post("/pause?mode=keep").status_code == 200
        waiting = pool.submit(tokens_of, managed)
        assert wait_until(lambda: managed.host.engine.open_requests == 1)
        found = managed.post("/update_weights_from_disk", model_path=str(other[0]), abort_all_requests=True)
        assert found.status_code == 200
        assert waiting.result()["finish_reason"] == "abort"


def test_a_drafter_s_tensors_change_no_token(managed):
    before = tokens_of(managed, count=40)["token_ids"]
    files, name = TensorFiles(managed.host.llm.loader.checkpoint.drafts[0]), "layers.0.mlp.up_proj.weight"
    tensors = {each: np.array(files.read(each)) for each in files}
    tensors[name] = np.roll(own := tensors[name], 3, axis=0)
    sums = managed.post("/weight_checker", action="checksum").json()["checksums"]
    given = {"serialized_named_tensors": [b64(save(tensors))], "selector": "draft"}
    assert managed.post("/update_weights_from_tensor", **given).status_code == 200
    assert tokens_of(managed, count=40)["token_ids"] == before
    found = managed.post("/weight_checker", action="compare", baseline=sums).json()
    assert not found["match"]
    assert all(each.startswith(managed.host.llm.draft_names[0]) for each in found["mismatches"])
    assert managed.http.post("/start_draft_weight_update").status_code == 200
    tensors[name] = own
    assert managed.http.post("/update_weights", content=save(tensors), headers=BYTES).status_code == 200
    assert managed.http.post("/finish_weight_update").status_code == 200
    assert managed.post("/weight_checker", action="compare", baseline=sums).json() == {"match": True, "mismatches": []}


def test_weights_are_read_by_their_checkpoint_s_names(managed):
    tensor = TensorFiles(managed.host.llm.directory).read(HEAD).astype(np.float32)
    for ask in (managed.http.post, lambda path, json: managed.http.request("GET", path, json=json)):
        found = ask("/get_weights_by_name", json={"name": HEAD, "truncate_size": 3}).json()
        assert np.array_equal(np.array(found, np.float32), tensor[:3])
    assert managed.post("/get_weights_by_name", name="model.norm.weight").json() == norm_of(managed)[:100].tolist()
    found = managed.post("/get_weights_by_name", name="x" * 10**6)
    assert (found.status_code, len(found.text) < 400) == (400, True)
    found = managed.post("/weights_checker", action="checksum").json()
    assert found["ranks"][0]["checksums"] == managed.post("/weight_checker", action="checksum").json()["checksums"]


def header(entries: dict, content: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + content


def entry(begin: int, end: int, shape=None, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


WRONG = {
    "pickle": (pickle.dumps({"a": 1}), "is a pickle"),
    "zip": (b"PK\x03\x04" + bytes(100), "is a pickle"),
    "nothing": (b"", "no whole safetensors file"),
    "a huge header": ((2**63).to_bytes(8, "little") + b"{}", "no whole safetensors file"),
    "a long header": (header(b" " * (2**22 + 1)), "at most 4194304"),
    "no JSON": (header(b"{"), "malformed"),
    "nested": (header(b"[" * 10**5), "malformed"),
    "a list": (header(b"[]"), "malformed"),
    "overlap": (header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "data_offsets"),
    "hole": (header({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "data_offsets"),
    "too short": (header({"a": entry(0, 8)}, bytes(4)), "8 bytes, and 4 follow"),
    "too long": (header({"a": entry(0, 4)}, bytes(8)), "4 bytes, and 8 follow"),
    "a wrong size": (header({"a": entry(0, 8, [3])}, bytes(8)), "data_offsets"),
    "negative": (header({"a": entry(0, 8, [-1, -2])}, bytes(8)), "no tensor's"),
    "many axes": (header({"a": entry(0, 4, [1] * 100)}, bytes(4)), "no tensor's"),
    "an unknown dtype": (header({"a": entry(0, 8, [1], "C64")}, bytes(8)), "dtype 'C64'"),
    "an unknown name": (save({"layers.none": np.zeros(3, np.float32)}), "layers.none"),
    "no name": (save({"": np.zeros(3, np.float32)}), "''"),
    "a wrong shape": (save({HEAD: np.zeros((3, 3), np.float32)}), HEAD),
    "a wrong kind": (save({HEAD: np.zeros((512, 192), np.int32)}), HEAD),
    "many names": (save({f"n{i}": np.zeros(0, np.float32) for i in range(20_000)}), "n"),
    "no tensors": (save({}), "no tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named_and_change_nothing(managed, name):
    data, message = WRONG[name]
    before = tokens_of(managed)
    found = managed.post("/update_weights_from_tensor", serialized_named_tensors=[b64(data)])
    assert found.status_code == 400, found.text[:500]
    assert found.json()["success"] is False
    assert message in found.json()["message"]
    assert len(found.text) < 2000
    found = managed.http.post("/update_weights", content=data, headers=BYTES)
    # Without a body there is no Content-Type that counts.
    assert found.status_code == 400, found.text[:500]
    assert tokens_of(managed) == before


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["!" * 8]}, "base64 is malformed"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AA==AA=="]}, "base64 is malformed"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "0 entries"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AA==", "AA=="]}, "2 entries"),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["AA=="], "load_format": "flattened_bucket"},
            "load_format is 'flattened_bucket'",
        ),
        ("/update_weights_from_disk", {"model_path": "/nowhere/at/all"}, "/nowhere/at/all"),
        ("/update_weights_from_disk", {"model_path": ""}, "model_path is empty"),
        ("/update_weights_from_disk", {"model_path": "x" * 5000}, ""),
        ("/update_weights_from_disk", {"model_path": "a\x00b"}, ""),
        ("/update_weights_from_distributed", {"names": []}, "/update_weights_from_distributed is refused"),
        ("/update_weights_from_ipc", {"zmq_handles": {}}, "/update_weights_from_ipc is refused"),
        ("/init_weights_update_group", {}, "/init_weights_update_group is refused"),
    ],
)
def test_other_forms_of_sglang_s_updates_fail_in_its_shape(managed, path, body, message):
    found = managed.post(path, **body)
    assert found.status_code == 400, found.text
    assert found.json()["success"] is False
    assert message in found.json()["message"]
    assert version(managed) == "default"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["float32"]}}, "update_info.names"),
        ("/update_weights", {"update_info": {}}, "update_info.model_path or"),
        ("/update_weights", {}, "update_info is missing"),
        ("/update_weights", {"update_info": {"serialized_named_tensors": "="}}, "base64 is malformed"),
        ("/finish_weight_update", {}, "no tensor was given"),
        ("/finish_weight_update", {"weight_version": "x" * 300}, "weight_version"),
        ("/update_weight_version", {"new_version": None}, "new_version"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
        ("/get_weights_by_name", {"name": "a", "truncate_size": 10**30}, "truncate_size"),
        ("/get_weights_by_name", {"name": ""}, "name"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "init_info.backend is 'nccl'"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}}, "init_info.master_address"),
        ("/weight_checker", {"action": "reset"}, "action reset is refused"),
        ("/weight_checker", {"action": "compare"}, "needs a baseline"),
        ("/weight_checker", {"action": "other"}, "action must be"),
        ("/collective_rpc", {"method": "exit"}, "collective_rpc is refused"),
        ("/update_weights_from_disk", {"model_path": "a", "manifest": {"a": 1}}, "manifest is not supported"),
    ],
)
def test_other_forms_of_vllm_s_updates_are_refused_by_name(managed, path, body, message):
    found = managed.post(path, **body)
    assert found.status_code == 400, found.text
    assert message in found.json()["error"]["message"]
    assert version(managed) == "default"


@pytest.mark.parametrize(
    "path", ["/get_weights_by_name", "/update_weights_from_disk", "/abort_requests", "/update_weights"]
)
def test_names_that_no_encoding_holds_are_refused(managed, path):
    name = rb'"\ud800"'
    bodies = {
        "/get_weights_by_name": b'{"name": %s}',
        "/update_weights_from_disk": b'{"model_path": %s}',
        "/abort_requests": b'{"request_ids": [%s]}',
        "/update_weights": b'{"update_info": {"model_path": %s}}',
    }
    found = managed.http.post(path, content=bodies[path] % name, headers={"content-type": "application/json"})
    assert found.status_code == 400, found.text
    assert version(managed) == "default"


@pytest.mark.parametrize("change", ["begin", "finish"])
def test_tensors_that_are_read_beside_another_call_are_of_no_other_update(change, monkeypatch):
    management = Management(SimpleNamespace(loaded_bytes=10), SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    data = np.frombuffer(save({"a": np.zeros(3, np.float32)}), np.uint8)

    async def read(function):
        if change == "begin":
            await management.begin("target")
        else:
            with pytest.raises(InputError, match="no tensor was given"):
                await management.finish()
        return function()

    async def main():
        with pytest.raises(InputError, match="no update of weights has begun here"):
            await management.give(data, has_begun=True)
        await management.begin("target")
        assert await management.give(data) == 1
        await management.begin("target")
        monkeypatch.setattr(management, "_in_thread", read)
        with pytest.raises(InputError, match="has ended, or began anew"):
            await management.give(data)
        assert not any(management._given.values())

    asyncio.run(main())


def test_ten_updates_at_once_come_one_after_the_other(managed, other):
    """And none of them stops a client's request."""
    _, tensors, llm = other
    own = {HEAD: np.array(TensorFiles(managed.host.llm.directory).read(HEAD))}

    def update(i: int) -> int:
        given = {"serialized_named_tensors": [b64(save(tensors if i % 2 else own))], "weight_version": str(i % 2)}
        return managed.post("/update_weights_from_tensor", **given).status_code

    before = tokens_of(managed)["token_ids"]
    with ThreadPoolExecutor(11) as pool:
        updates = [pool.submit(update, i) for i in range(10)]
        asked = [tokens_of(managed, count=100) for _ in range(3)]
        assert {each.result() for each in updates} == {200}
    assert all(len(choice["token_ids"]) == choice["weight_versions"][-1]["end"] == 100 for choice in asked)
    assert tokens_of(managed)["token_ids"] == (expected(llm) if version(managed) == "1" else before)


def test_an_update_of_parts_is_dropped_by_the_next_one(managed, other):
    _, tensors, _ = other
    before = tokens_of(managed)
    assert managed.http.post("/start_weight_update").status_code == 200
    assert managed.http.post("/update_weights", content=save(tensors), headers=BYTES).status_code == 200
    assert managed.http.post("/start_weight_update").status_code == 200
    found = managed.http.post("/finish_weight_update")
    assert (found.status_code, tokens_of(managed)) == (400, before)


def test_a_body_of_bytes_is_limited(managed):
    """It is refused by its length, before it is sent."""
    fields = f"Host: x\r\nAuthorization: Bearer root\r\nContent-Type: {BYTES['Content-Type']}\r\n"
    fields += f"Content-Length: {managed.serving.limits.tensor_body_bytes + 1}"
    with socket.create_connection(("127.0.0.1", int(managed.url.rpartition(":")[2]))) as s:
        s.sendall(f"POST /update_weights HTTP/1.1\r\n{fields}\r\n\r\n".encode())
        assert s.recv(2**12).startswith(b"HTTP/1.1 413 ")
    found = managed.http.post("/update_weights_from_tensor", content=b"x", headers=BYTES)
    assert found.status_code == 415
