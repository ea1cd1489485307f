"""An administrator's endpoints, of vLLM's and SGLang's names: pauses, sleep, new weights.

They are there with --admin-api-key, and need that key (`access.Access`). New weights are safetensors or a directory:
nothing that could run code is read, and no other transport is there.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, Field, ValidationError

from dflash_jax.argument_checks import is_text
from dflash_jax.errors import InputError
from dflash_jax.media.data_url import PIECE_CHARACTERS, decoded
from dflash_jax.media.errors import MediaError
from dflash_jax.server.access import media_type
from dflash_jax.server.answer_schema import (
    Aborted,
    Flushed,
    IsPaused,
    IsSleeping,
    Message,
    Paused,
    Slept,
    WeightInfo,
    Woken,
)
from dflash_jax.server.body import MediaRoute
from dflash_jax.server.engine_client import EngineClient
from dflash_jax.server.errors import ApiError, JsonResponse
from dflash_jax.server.schema_base import Body, Items, Json, Strict, neutral_table
from dflash_jax.server.serving import BYTES_TYPE, Serving
from dflash_jax.server.stream import JsonAnswer

router = APIRouter(route_class=MediaRoute)


def _text(value: str) -> str:
    if not is_text(value):
        raise ValueError("must be text that UTF-8 can hold")
    return value


Text = Annotated[str, Field(min_length=1), AfterValidator(_text)]
Version = Annotated[Text, Field(max_length=256)]
Mode = Annotated[Literal["abort", "wait", "keep"], Query()]
# Answers of SGLang's, whose failures have another form than ours.
DONE: dict[int | str, dict[str, Any]] = {200: {"model": Flushed}, 400: {"model": Flushed}}
# SGLang's modes of a pause, and ours. "in_place" would keep keys and values of old weights, which are never used here.
PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
# Formats of SGLang that a directory or safetensors have here anyway.
FORMATS = (None, "auto", "safetensors")
RECOMPUTED = "Requests under way go on with them, and compute what they have in caches again."
TRANSPORTS = "weights come as safetensors, or from a directory on the server"


def _engine(http: Request) -> EngineClient:
    return http.app.state.serving.engine


async def _done(work: Awaitable[Any], message: str, **more: Any) -> JsonResponse:
    """SGLang's answer to what may fail."""
    try:
        await work
    except InputError as e:
        return JsonResponse({"success": False, "message": str(e)}, 400)
    return JsonResponse({"success": True, "message": message, **more})


def _refused(reason: str) -> JsonResponse:
    return JsonResponse({"success": False, "message": reason}, 400)


# Pauses.


@router.post("/pause", responses={200: {"model": Paused}}, response_model=None)
async def pause(http: Request, mode: Mode = "abort", clear_cache: bool = True):
    """Pauses, as vLLM: ends requests, waits for their ends, or keeps them. With keep, new ones are taken, and wait.

    ``clear_cache`` has no effect: prefixes are forgotten with new weights.
    """
    await _engine(http).manage("pause", mode=mode)
    return JsonResponse({"status": "paused"})


@router.post("/resume", responses={200: {"model": Paused}}, response_model=None)
async def resume(http: Request):
    """Ends a pause."""
    await _engine(http).manage("resume")
    return JsonResponse({"status": "resumed"})


@router.get("/is_paused", responses={200: {"model": IsPaused}}, response_model=None)
async def is_paused(http: Request):
    """Whether nothing is generated."""
    return JsonResponse({"is_paused": _engine(http).state.rest != ""})


class AbortRequests(Strict):
    """vLLM's ``/abort_requests``; without ids all requests."""

    request_ids: Items[Text] | None = None


@router.post("/abort_requests", responses={200: {"model": Aborted}}, response_model=None)
async def abort_requests(http: Request, body: AbortRequests | None = None):
    """Ends requests by their ids, or all of them, whoever has sent them."""
    names = None if body is None else body.request_ids
    return JsonResponse({"status": "aborted", "aborted": await _engine(http).manage("abort", names=names)})


class PauseGeneration(Strict):
    """SGLang's ``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGeneration(Strict):
    """SGLang's ``/continue_generation``."""

    neutral = neutral_table("continue_generation")


@router.post("/pause_generation", responses={200: {"model": Message}}, response_model=None)
async def pause_generation(http: Request, body: PauseGeneration | None = None):
    """Pauses, as SGLang. With retract and in_place, requests are kept; new weights compute their caches again."""
    await _engine(http).manage("pause", mode=PAUSES[(body or PauseGeneration()).mode])
    return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation", responses={200: {"model": Message}}, response_model=None)
async def continue_generation(http: Request, body: ContinueGeneration | None = None):
    """Ends a pause."""
    await _engine(http).manage("resume")
    return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})


# Memory.


@router.post("/sleep", responses={200: {"model": Slept}}, response_model=None)
async def sleep(http: Request, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort"):
    """Pauses and frees the devices' memory, as vLLM: 1 keeps the weights on the host, 2 drops them, 0 is a pause."""
    await _engine(http).manage("sleep", level=level, mode=mode)
    return JsonResponse({"status": "sleeping" if level else "paused", "level": level})


@router.post("/wake_up", responses={200: {"model": Woken}}, response_model=None)
async def wake_up(http: Request, tags: Annotated[list[str] | None, Query()] = None):
    """Ends a sleep, or brings back what the tags name; the last one ends the pause, too."""
    await _engine(http).manage("wake", tags=tags or None)
    return JsonResponse({"status": "awake" if _engine(http).state.rest == "" else "sleeping", "tags": tags})


@router.get("/is_sleeping", responses={200: {"model": IsSleeping}}, response_model=None)
async def is_sleeping(http: Request):
    """Whether weights or caches are not on the devices."""
    return JsonResponse({"is_sleeping": _engine(http).state.rest == "sleeping"})


class Occupation(Strict):
    """SGLang's ``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: Items[str] | None = None

    @property
    def known(self) -> list[str] | None:
        """The tags without SGLang's of CUDA graphs, which are not here."""
        return None if self.tags is None else [tag for tag in self.tags if tag != "cuda_graph"]


@router.post("/release_memory_occupation", responses=DONE, response_model=None)
async def release_memory_occupation(http: Request, body: Occupation | None = None):
    """Frees weights (copied to the host), caches, or both. Requests wait."""
    tags = (body or Occupation()).known
    tags = ["weights", "kv_cache"] if tags is None else tags
    return await _done(_engine(http).manage("release", tags=tags), "Memory released.")


@router.post("/resume_memory_occupation", responses=DONE, response_model=None)
async def resume_memory_occupation(http: Request, body: Occupation | None = None):
    """Undoes /release_memory_occupation. When all is there again, requests go on."""
    return await _done(_engine(http).manage("wake", tags=(body or Occupation()).known), "Memory resumed.")


# Weights, by vLLM's names.


class InitInfo(Strict):
    """vLLM's ``/init_weight_transfer_engine``."""

    init_info: Json = Field(default_factory=dict)


class UpdateInfo(Strict):
    """What ``/update_weights`` gets as JSON: a directory on the server, or safetensors in base64."""

    model_path: Text | None = None
    serialized_named_tensors: str | None = None


class UpdateWeights(Strict):
    """vLLM's ``/update_weights``."""

    update_info: UpdateInfo


class FinishUpdate(Strict):
    """vLLM's ``/finish_weight_update``."""

    weight_version: Version | None = None


class NewVersion(Strict):
    """vLLM's and SGLang's ``/update_weight_version``."""

    new_version: Version
    abort_all_requests: bool = False


class WeightChecker(Strict):
    """vLLM's ``/weight_checker``."""

    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


@router.post("/init_weight_transfer_engine", responses={200: {"model": Message}}, response_model=None)
async def init_weight_transfer_engine(http: Request, body: InitInfo):
    """Nothing is to be made ready; what NCCL or CUDA's IPC would need is refused by name."""
    if (backend := body.init_info.get("backend")) not in (None, "safetensors"):
        raise ApiError(400, f"init_info.backend is {str(backend)[:40]!r}: {TRANSPORTS}", "init_info.backend")
    if others := sorted(set(body.init_info) - {"backend"}):
        field = f"init_info.{others[0][:64]}"
        raise ApiError(400, f"{field} is of a transport that is not here: {TRANSPORTS}", field)
    return JsonResponse({"message": "Weight transfer initialized"})


@router.post("/start_weight_update", responses={200: {"model": Message}}, response_model=None)
async def start_weight_update(http: Request):
    """Begins an update of the target in several parts; what an update before it has left is dropped."""
    await _engine(http).manage("begin", selector="target")
    return JsonResponse({"message": "Weight update started"})


@router.post("/start_draft_weight_update", responses={200: {"model": Message}}, response_model=None)
async def start_draft_weight_update(http: Request):
    """The parts that follow are the drafter's."""
    await _engine(http).manage("begin", selector="draft")
    return JsonResponse({"message": "Draft weight update started"})


_INFO = {"type": "object", "required": ["update_info"], "properties": {"update_info": UpdateInfo.model_json_schema()}}
UPDATE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            BYTES_TYPE.decode(): {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": _INFO},
        },
    }
}


@router.post("/update_weights", responses={200: {"model": Message}}, response_model=None, openapi_extra=UPDATE_BODY)
async def update_weights(http: Request):
    """New weights: a part of an update that has begun, or by themselves.

    The body is a safetensors file (Content-Type: application/octet-stream), or JSON.
    """
    engine = _engine(http)
    if media_type(dict(http.scope["headers"])) == BYTES_TYPE:
        await engine.manage("give", np.frombuffer(await http.body(), np.uint8))
        return JsonResponse({"message": "Weights updated"})
    try:
        info = UpdateWeights.model_validate(given := await _json(http)).update_info
    except ValidationError as e:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors, body=given) from None
    if (info.model_path is None) == (info.serialized_named_tensors is None):
        message = f"give update_info.model_path or update_info.serialized_named_tensors, and one of them: {TRANSPORTS}"
        raise ApiError(400, message, "update_info")
    if info.serialized_named_tensors is None:
        await engine.manage("update", path=info.model_path)
    else:
        name = "update_info.serialized_named_tensors"
        await engine.manage("give", await _bytes(http, info.serialized_named_tensors, name))
    return JsonResponse({"message": "Weights updated"})


async def _json(http: Request) -> Any:
    try:
        return await http.json()
    except ValueError as e:
        raise ApiError(400, f"the body is not JSON: {str(e)[:200]}") from None


async def _bytes(http: Request, text: str, name: str) -> np.ndarray:
    """The bytes of base64. A thread decodes them, in pieces, between which the event loop has its turns."""
    serving: Serving = http.app.state.serving

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(text), PIECE_CHARACTERS):
            # No character beyond ASCII is base64, and neither is its replacement.
            yield text[at : at + PIECE_CHARACTERS].encode("ascii", "replace")

    try:
        content = await asyncio.to_thread(decoded, pieces(), name, serving.limits.tensor_body_bytes)
    except MediaError as e:
        raise ApiError(e.status, str(e), name) from None
    return np.frombuffer(content, np.uint8)


@router.post("/finish_weight_update", responses={200: {"model": Message}}, response_model=None)
async def finish_weight_update(http: Request, body: FinishUpdate | None = None):
    """Ends an update: all of its tensors take their places at once, or none. Requests under way go on."""
    await _engine(http).manage("finish", version=body and body.weight_version)
    return JsonResponse({"message": "Weight update finished"})


@router.post("/update_weight_version", responses={200: {"model": Flushed}}, response_model=None)
async def update_weight_version(http: Request, body: NewVersion):
    """Gives the weights another version."""
    if body.abort_all_requests:
        await _engine(http).manage("abort", names=None)
    await _engine(http).manage("name", version=body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return JsonResponse({"success": True, "message": message, "new_version": body.new_version})


@router.get("/weight_info", responses={200: {"model": WeightInfo}}, response_model=None)
async def weight_info(http: Request):
    """The version of the weights; of replicas that have several, all of them."""
    return JsonResponse({"weight_version": _engine(http).state.version})


@router.post("/weight_checker", response_model=None)
async def weight_checker(http: Request, body: WeightChecker):
    """SHA-256 of all weights as they are computed with, or which of them differ from a baseline."""
    if body.action == "reset":
        raise ApiError(400, "action reset is refused: nothing here overwrites weights but new ones", "action")
    if body.action == "compare" and body.baseline is None:
        raise ApiError(400, "action compare needs a baseline", "baseline")
    sums = await _engine(http).manage("checksums")
    if body.baseline is None:
        return JsonAnswer({"checksums": sums})
    known = body.baseline
    mismatches = sorted(name for name in sums.keys() | known.keys() if sums.get(name) != known.get(name))
    return JsonAnswer({"match": not mismatches, "mismatches": mismatches})


@router.post("/collective_rpc", response_model=None)
async def collective_rpc(http: Request):
    """Refused."""
    raise ApiError(400, "collective_rpc is refused: the server runs no method that a client names")


# Weights, by SGLang's names.


class Update(Body):
    """Fields of SGLang's updates. Caches of old weights are always dropped, so that ``flush_cache`` has no effect."""

    neutral = neutral_table("update")

    weight_version: Version | None = None
    abort_all_requests: bool = False
    load_format: str | None = None

    @property
    def in_flight(self) -> str:
        """What becomes of requests under way."""
        return "abort" if self.abort_all_requests else "recompute"


class UpdateFromDisk(Update):
    """SGLang's ``/update_weights_from_disk``."""

    model_path: str


class UpdateFromTensor(Update):
    """SGLang's ``/update_weights_from_tensor``, with a safetensors file in base64 in place of a pickle."""

    serialized_named_tensors: str | Items[str]
    selector: Literal["target", "draft", "all"] = "target"


class GetWeights(Strict):
    """SGLang's ``/get_weights_by_name``."""

    name: Text
    truncate_size: int = Field(100, ge=0, le=2**31 - 1)


class WeightsChecker(Strict):
    """SGLang's ``/weights_checker``."""

    neutral = neutral_table("weights_checker")

    action: str = "checksum"


def _check_format(body: Update) -> None:
    if body.load_format not in FORMATS:
        known = ", ".join(filter(None, FORMATS))
        raise InputError(f"load_format is {body.load_format[:40]!r}: it must be one of {known}; {TRANSPORTS}")


@router.post("/update_weights_from_disk", responses=DONE, response_model=None)
async def update_weights_from_disk(http: Request, body: UpdateFromDisk):
    """New weights of the target from a directory on the server. Requests under way go on, or are ended."""

    async def update() -> None:
        _check_format(body)
        if not body.model_path:
            raise InputError("model_path is empty: it must be a directory, or a repository's name")
        arguments = {"path": body.model_path, "version": body.weight_version, "in_flight": body.in_flight}
        await _engine(http).manage("update", **arguments)

    return await _done(update(), f"Succeeded to update model weights. {RECOMPUTED}", num_paused_requests=0)


@router.post("/update_weights_from_tensor", responses=DONE, response_model=None)
async def update_weights_from_tensor(http: Request, body: UpdateFromTensor):
    """New tensors, of which others stay; requests as of /update_weights_from_disk."""

    async def update() -> None:
        _check_format(body)
        given = body.serialized_named_tensors
        texts = [given] if isinstance(given, str) else given
        if len(texts) != 1:
            raise InputError(f"serialized_named_tensors has {len(texts)} entries: give one, of whole tensors")
        # A head of the target comes with the target.
        selector = "draft" if body.selector == "draft" else "target"
        arguments = {"selector": selector, "version": body.weight_version, "in_flight": body.in_flight}
        try:
            tensors = await _bytes(http, texts[0], "serialized_named_tensors")
        except ApiError as e:
            raise InputError(e.message.partition(": try again")[0]) from None
        await _engine(http).manage("update", tensors, **arguments)

    return await _done(update(), f"Succeeded to update model weights. {RECOMPUTED}")


@router.post("/update_weights_from_distributed", responses={400: {"model": Flushed}}, response_model=None)
@router.post("/update_weights_from_ipc", responses={400: {"model": Flushed}}, response_model=None)
@router.post("/init_weights_update_group", responses={400: {"model": Flushed}}, response_model=None)
async def other_transports(http: Request):
    """Refused: nothing of NCCL and of CUDA's IPC is here."""
    return _refused(f"{http.scope['path']} is refused: {TRANSPORTS}")


@router.post("/get_weights_by_name", response_model=None)
@router.get("/get_weights_by_name", response_model=None, include_in_schema=False)
async def get_weights_by_name(http: Request, body: GetWeights):
    """The first rows of a tensor, by its checkpoint's name."""
    part = await _engine(http).manage("read", name=body.name, most=body.truncate_size)
    numbers = np.frombuffer(part["numbers"], np.float32).reshape(part["shape"])
    if numbers.ndim < 2:
        return JsonAnswer(numbers.tolist())
    return JsonAnswer(row.tolist() for row in numbers)


@router.post("/weights_checker", responses={400: {"model": Flushed}}, response_model=None)
async def weights_checker(http: Request, body: WeightsChecker):
    """SGLang's checksums; its other actions are refused."""
    if body.action != "checksum":
        return _refused(f"action {body.action[:40]!r} is refused: only checksum is here; /weight_checker compares")
    try:
        sums = await _engine(http).manage("checksums")
    except InputError as e:
        return _refused(str(e))
    return JsonAnswer({"success": True, "message": "", "ranks": [{"checksums": sums}]})
