"""What processes of a server make of the arguments of `dflash serve`: a model, its engine, what fronts serve."""

import logging
import sys
from importlib.util import find_spec

from dflash_jax.errors import InputError
from dflash_jax.options.serve import REASONING_PARSERS, TOOL_CALL_PARSERS
from dflash_jax.options.systems import llm_keywords
from dflash_jax.parallel.devices import set_platform
from dflash_jax.progress import starting
from dflash_jax.server import transport
from dflash_jax.server.limits import Additions

log = logging.getLogger("dflash_jax.server")

# Below this, a shorter context is no longer tried on its own.
LEAST_LEN = 4096


def follows(args) -> bool:
    """Joins the processes that ``--distributed`` makes one server of: whether this one follows the first."""
    if not args.distributed:
        return False
    if args.target is None and not args.bundled:
        raise InputError("--distributed: name a model, or --bundled, so that every process has the same")
    from dflash_jax.parallel import distributed

    distributed.start()
    return not distributed.is_first()


def name_model(args) -> None:
    """Names SmolLM2 or the bundled pair where the arguments name no model, so that all processes have the same."""
    if args.target is None and not args.bundled:
        from dflash_jax.checkpoint.smollm2 import smollm2_or_bundled

        args.target = smollm2_or_bundled(log.warning)
        args.bundled = args.target is None


def load(args, system):
    """The `LLM` that the arguments describe, as `name_model` changes them."""
    with starting():
        set_platform(args.platform)
        from dflash_jax.frontend.llm import LLM

    name_model(args)
    return LLM(**llm_keywords(args, system))


def engine_of(args, llm):
    """An engine of the length that the arguments ask for; without one, of the longest half of the model's that fits."""
    capacity, slots = llm.max_len, llm.programs.data * -(-args.slots // llm.programs.data)
    options = {"max_queue": args.max_queue, "max_num_batched_tokens": args.max_num_batched_tokens, "masks": True}
    options |= {"max_total_tokens": args.max_total_tokens, "trusts_priority": args.trust_priority}
    while True:
        try:
            return llm.new_engine(llm.programs, slots, capacity, **options)
        except InputError:
            if args.max_len is not None or args.max_total_tokens is not None or capacity // 2 < LEAST_LEN:
                raise
            capacity //= 2
            log.warning("one request of the model's %d tokens does not fit: %d at most", llm.max_len, capacity)


def response_store(args, temporary: str | None = None):
    """The store of responses that the arguments describe.

    Args:
        args: The arguments of `serve`.
        temporary: The path of a temporary file that several processes share; None: of this process alone.
    """
    from dflash_jax.server.response_store import ResponseStore

    path = args.response_store_path
    return ResponseStore(args.response_store, path=path or temporary, is_temporary=path is None)


def model_names(args) -> list[str]:
    """The names under which clients know the model."""
    return args.served_model_name or [args.target or "dflash-tiny"]


def host_of(args, llm):
    """The `EngineHost` of a model that the arguments describe. Nothing runs yet."""
    from dflash_jax.engine.service import AsyncEngine
    from dflash_jax.server.engine_host import EngineHost

    device, engine = set_platform(args.platform), engine_of(args, llm)
    info = {
        "model_path": str(args.target or "bundled"),
        "speculative_draft_model_path": ", ".join(args.draft) if isinstance(args.draft, list) else str(args.draft),
        "speculative_algorithm": llm.drafting_method,
        "speculative_num_draft_tokens": llm.largest_block,
        "block_size": llm.block_size,
        "device": device,
        "dtype": llm.dtype,
        "quantization": args.quantize,
        "activations": args.activations,
        "kv_cache_dtype": "fp8_e4m3" if llm.has_fp8_caches else "auto",
        "slots": engine.runner.slots,
        "max_queue": args.max_queue,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "mem_fraction": args.mem_fraction,
    }
    return EngineHost(llm, AsyncEngine(engine, restarts=int(args.restart_on_failure)), model_names(args)[0], info)


def serving_of(args, llm, engine, store, fronts: int = 1):
    """The `Serving` that the arguments describe.

    Args:
        args: The arguments of `serve`.
        llm: The model as a front knows it.
        engine: Its `EngineClient`.
        store: The store of responses.
        fronts: How many processes share limits of memory.
    """
    from dflash_jax.server.limits import DEFAULT_LIMITS, Limits
    from dflash_jax.server.serving import Serving

    limits = Limits(
        media_body_bytes=args.max_media_body,
        total_body_bytes=max(DEFAULT_LIMITS.total_body_bytes // fronts, args.max_media_body),
        logprobs=args.max_logprobs,
        unknown_fields=args.unknown_fields,
        trust_request_chat_template=args.trust_request_chat_template,
    )
    options = {"response_store": store, "stream_interval": args.stream_interval}
    options |= {"keep_alive_s": args.sse_keep_alive_interval, "json_blanks": args.json_whitespace}
    options["requires_answer"] = args.require_answer
    if args.tool_call_parser is not None:
        options["call_syntax"] = TOOL_CALL_PARSERS[args.tool_call_parser]
    if args.reasoning_parser is not None:
        options["begins_in_thought"] = REASONING_PARSERS[args.reasoning_parser]
    return Serving(llm, engine, model_names(args), limits, additions=Additions.of_arguments(args), **options)


def set_logging(args) -> None:
    """Has this process log to stderr, as the arguments say."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    # At INFO, JAX lists the backends that this machine does not have, which is no fault.
    logging.getLogger("jax").setLevel(max(logging.WARNING, logging.getLogger().level))


def check_extra() -> None:
    """Raises InputError where the server's extra is not installed."""
    if find_spec("uvicorn") is None:
        raise InputError('the server needs its extra: pip install "dflash-jax[server]"')


def warn_of_open_access(args) -> None:
    """Logs a warning where the arguments open the server to a network without a key."""
    if not (args.api_keys or args.uds is not None or transport.is_loopback(args.host)):
        log.warning("anyone who reaches %s can use this server: --api-key-file demands a key", args.host)
