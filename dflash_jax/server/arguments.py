"""The options of python -m dflash_jax.serve, and those of other servers that mean the same."""

import argparse
import json
import logging
import os
import re
from dataclasses import dataclass

from dflash_jax.arguments import block_size
from dflash_jax.errors import InputError
from dflash_jax.options import Parser, add_platform, with_config
from dflash_jax.server import cors

log = logging.getLogger("dflash_jax.server")

DESCRIPTION = """OpenAI's and SGLang's HTTP interfaces for a target and a DFlash drafter. Without arguments: the
bundled tiny pair on 127.0.0.1:30000. Launch commands of vLLM and SGLang work with only the program's name replaced."""


@dataclass(frozen=True)
class Alias:
    """Options of other servers, and what becomes of them: ours of that name, or nothing, with the reason.
    ``values``: how many words follow."""

    names: tuple[str, ...]
    ours: str | None = None
    reason: str = ""
    values: str | int | None = None


ALIASES = (
    Alias(("--model", "--model-path"), "target"),
    Alias(("--speculative-draft-model-path", "--speculative-draft-model"), "draft"),
    Alias(("--speculative-config", "-sc"), "speculative_config"),
    Alias(("--speculative-algorithm",), "speculative_algorithm"),
    Alias(("--speculative-num-draft-tokens",), "max_block_size"),
    Alias(("--speculative-dflash-draft-window-size", "--speculative-draft-window-size"), "draft_window_size"),
    Alias(("--speculative-token-map",), "draft_tokens"),
    Alias(("--max-model-len", "--context-length"), "max_len"),
    Alias(("--max-num-seqs", "--max-running-requests"), "slots"),
    Alias(("--gpu-memory-utilization", "--mem-fraction-static"), "mem_fraction"),
    Alias(("--chunked-prefill-size",), "max_num_batched_tokens"),
    Alias(("--max-queued-requests",), "max_queue"),
    Alias(("--tensor-parallel-size", "-tp", "--tp-size", "--tp"), "tensor"),
    Alias(("--data-parallel-size", "-dp", "--dp-size", "--dp"), "data"),
    Alias(("--uvicorn-log-level",), "log_level"),
    Alias(("--no-enable-prefix-caching", "--disable-radix-cache"), "no_prefixes", values=0),
    Alias(("--trust-remote-code",), reason="no code from a checkpoint is ever run", values=0),
    Alias(
        (
            "--attention-backend",
            "--speculative-draft-attention-backend",
            "--linear-attn-backend",
            "--mamba-backend",
            "--moe-backend",
            "--moe-runner-backend",
            "--sampling-backend",
            "--grammar-backend",
            "--guided-decoding-backend",
        ),
        reason="there is one implementation, compiled for the device",
    ),
    Alias(
        ("--mamba-scheduler-strategy", "--mamba-ssm-dtype", "--mamba-cache-mode", "--max-mamba-cache-size"),
        reason="recurrent states are rolled back by replay: there are no snapshots to arrange",
    ),
    Alias(
        ("--enforce-eager", "--disable-cuda-graph", "--disable-overlap-schedule", "--async-scheduling"),
        reason="everything is compiled before the server is ready, and the host's work always overlaps the device's",
        values=0,
    ),
    Alias(("--cuda-graph-max-bs", "--max-cudagraph-capture-size"), reason="all numbers of rows are compiled"),
    Alias(
        ("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-metrics", "--enable-auto-tool-choice"),
        reason="it is always on",
        values=0,
    ),
    Alias(
        ("--reasoning-parser", "--tool-call-parser", "--chat-template-content-format"),
        reason="the format follows from the checkpoint's chat template",
    ),
    Alias(("--enable-expert-parallel",), reason="experts are cut within; --mesh expert=N spreads them", values=0),
    Alias(("--page-size", "--swap-space", "--kv-cache-dtype"), reason="slots are contiguous, in the model's dtype"),
    Alias(
        ("--disable-log-requests", "--disable-log-stats", "--no-enable-log-requests"),
        reason="prompts are never logged",
        values=0,
    ),
    Alias(("--language-model-only",), reason="only text is served", values=0),
    Alias(("--seed", "--random-seed"), reason="each request has a seed of its own"),
    Alias(("--generation-config", "--tokenizer-mode", "--load-format"), reason="the checkpoint says"),
)
# API keys, which a list of processes does not show.
KEYS_VARIABLE = "DFLASH_API_KEY"
# Of SGLang; what they switch on is always on here.
VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM")


def make_parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m dflash_jax.serve", description=DESCRIPTION, allow_abbrev=False)
    http = p.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="default: %(default)s; 0.0.0.0 for all networks")
    http.add_argument("--port", type=int, default=30000, help="default: %(default)s; 0 takes a free one")
    http.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="what clients must send, one of them (default: no key); other users see it in the list of processes, "
        f"but not those in --api-key-file or {KEYS_VARIABLE} (separated by commas)",
    )
    http.add_argument("--api-key-file", metavar="FILE", help="API keys, one a line")
    http.add_argument(
        "--allowed-hosts",
        metavar="NAME,...",
        help="names that clients may ask for, *.example.com for a domain, * for any (default: with --host 127.0.0.1 "
        "local names, which no other site's page can use, otherwise any)",
    )
    http.add_argument(
        "--max-connections", type=int, default=4096, metavar="N", help="connections at a time (default: %(default)s)"
    )
    http.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: the target as given")
    http.add_argument(
        "--unknown-fields", default="refuse", choices=["refuse", "warn"], help="of requests (default: refuse)"
    )
    http.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring a chat_template of their own"
    )
    cors.add_arguments(http)
    http.add_argument("--drain-s", type=float, default=30.0, metavar="S", help="after SIGTERM (default: 30)")
    http.add_argument(
        "--response-store", type=int, default=1024, metavar="N", help="responses kept for later turns (default: 1024)"
    )
    failing = http.add_mutually_exclusive_group()
    failing.add_argument(
        "--exit-on-failure",
        action="store_true",
        help="exit with code 1 when the device has failed (default: stay, 503)",
    )
    failing.add_argument(
        "--restart-on-failure", action="store_true", help="restart the engine, empty, after the first failure"
    )
    http.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error", "critical"])

    models = p.add_argument_group("models (as for dflash_jax.generate)")
    models.add_argument("model", nargs="?", metavar="MODEL", help="the target")
    models.add_argument("--config", metavar="FILE", help="a TOML of configs/; options override it")
    models.add_argument("--target", metavar="PATH|REPO", help="target checkpoint (default: the bundled tiny model)")
    models.add_argument("--draft", metavar="PATH|REPO|none", default="auto", help="drafter; none decodes plainly")
    models.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on CPU, bfloat16 elsewhere)")
    models.add_argument("--quantize", choices=["none", "int8", "fp8"], help="quantize the target on loading")
    models.add_argument("--mesh", metavar="data=2,tensor=4", help="devices to share the work among")
    add_platform(models)
    models.add_argument("--reproducible", action="store_true", help="the same bits at any load, in bfloat16 too")

    load = p.add_argument_group("load")
    load.add_argument(
        "--max-len", type=int, metavar="N", help="most tokens of a request (default: the model's, or what fits)"
    )
    load.add_argument("--slots", type=int, default=32, metavar="N", help="requests at a time (default: %(default)s)")
    load.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that wait (default: 1024)")
    load.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (default: 2048; with Triton 4096)"
    )
    load.add_argument(
        "--mem-fraction", type=float, default=0.9, metavar="F", help="of a device's memory (default: 0.9)"
    )
    load.add_argument("--prefix-bytes", type=int, metavar="N", help="memory for known prefixes (default: a twentieth)")

    drafting = p.add_argument_group("drafting")
    drafting.add_argument("--block-size", type=block_size, default="auto", metavar="B", help="1, a number, or auto")
    drafting.add_argument("--draft-window-size", type=int, metavar="W", help="context positions that the drafter sees")
    drafting.add_argument("--draft-sink-size", type=int, default=0, metavar="S", help="first positions it sees besides")
    drafting.add_argument(
        "--draft-tokens", metavar="FILE|none", default="auto", help="JSON list of the only ids to draft"
    )

    others = p.add_argument_group("options of vLLM and SGLang that are understood (README has the table)")
    for alias in ALIASES:
        others.add_argument(
            *alias.names,
            dest=f"alias_{alias.names[0].lstrip('-').replace('-', '_')}",
            action="store_true" if alias.values == 0 else "store",
            default=None,
            help=argparse.SUPPRESS,
        )
    return p


def parse(argv: list[str] | None):
    """Arguments under our names, and the `System` of --config, or None. Raises InputError."""
    args, system = with_config(make_parser(), argv)
    args.max_block_size, parts = None, {}
    for alias in ALIASES:
        value = getattr(args, f"alias_{alias.names[0].lstrip('-').replace('-', '_')}")
        if value is None:
            continue
        if alias.ours is None:
            log.warning("%s needs nothing here: %s", alias.names[0], alias.reason)
        elif alias.ours in ("tensor", "data"):
            parts[alias.ours] = _number(alias, value, int)
        else:
            _take(args, alias, value)
    if parts:
        if args.mesh is not None:
            raise InputError(f"--mesh {args.mesh} and a number of devices: give one of them")
        args.mesh = ",".join(f"{axis}={n}" for axis, n in sorted(parts.items()))
    for name in VARIABLES:
        if name in os.environ:
            log.warning("%s needs nothing here: the host's work always overlaps the device's", name)
    take_model_from_keys(args)
    if args.model is not None:
        if args.target not in (None, args.model):
            raise InputError(f"MODEL {args.model} and --target {args.target}: give one of them")
        args.target = args.model
    args.dtype = {"auto": None, "half": "float16"}.get(args.dtype, args.dtype)
    least_of = {"max_queue": 0, "max_num_batched_tokens": 16, "drain_s": 0, "response_store": 0, "max_connections": 1}
    for name, least in least_of.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {least} or more")
    args.cors = cors.of_arguments(args)
    args.api_keys = api_keys(args)
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port {args.port}: it must be 0 to 65535")
    return args, system


def take_model_from_keys(args) -> None:
    """``--api-key KEY MODEL``: what is a directory or a repository's name behind the first key is the target."""
    keys = args.api_key or []
    if args.model is None and args.target is None and len(keys) > 1:
        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", keys[-1])
        if is_name or os.path.isdir(keys[-1]):
            args.model = keys.pop()


def api_keys(args) -> list[str]:
    """All API keys: of the options, the file and the environment. Raises InputError."""
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        try:
            with open(args.api_key_file, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or "it is not UTF-8"
            raise InputError(f"--api-key-file {args.api_key_file}: {reason}") from None
        if not any(lines):
            raise InputError(f"--api-key-file {args.api_key_file} has no key")
        keys += filter(None, lines)
    if (given := os.environ.get(KEYS_VARIABLE)) is not None:
        keys += [key.strip() for key in given.split(",")]
    if not all(keys):
        raise InputError(f"an API key is empty: leave out --api-key and {KEYS_VARIABLE} to need none")
    if any(not (key.isascii() and key.isprintable()) or " " in key for key in keys):
        raise InputError("an API key has a character that HTTP cannot send: use letters, digits and signs")
    return keys


def _number(alias: Alias, value: str, kind):
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{alias.names[0]} {value!r}: it must be a number") from None


def _take(args, alias: Alias, value) -> None:
    """Puts another server's option where ours is."""
    name = alias.ours
    if name == "speculative_config":
        _take_config(args, value)
    elif name == "speculative_algorithm":
        if value.upper() != "DFLASH":
            raise InputError(f"--speculative-algorithm {value}: it must be DFLASH")
    elif name == "no_prefixes":
        args.prefix_bytes = 0
    elif name == "max_num_batched_tokens" and value == "-1":
        log.warning("%s -1: prompts are always prefilled in chunks", alias.names[0])
    elif name == "mem_fraction":
        args.mem_fraction = _number(alias, value, float)
    elif name in ("slots", "max_len", "max_queue", "max_num_batched_tokens", "max_block_size", "draft_window_size"):
        setattr(args, name, _number(alias, value, int))
    else:
        setattr(args, name, value)


def _take_config(args, value: str) -> None:
    """vLLM's JSON: n speculative tokens are a block of n + 1."""
    try:
        given = json.loads(value)
    except ValueError as e:
        raise InputError(f"--speculative-config is not JSON: {e}") from None
    if not isinstance(given, dict) or given.get("method") != "dflash":
        raise InputError(f"--speculative-config {value}: its method must be dflash")
    unknown = set(given) - {
        "method",
        "model",
        "num_speculative_tokens",
        "draft_tensor_parallel_size",
        "attention_backend",
    }
    if unknown:
        raise InputError(f"--speculative-config: {min(unknown)!r} is not known")
    args.draft = given.get("model", args.draft)
    if "num_speculative_tokens" in given:
        if not isinstance(given["num_speculative_tokens"], int):
            raise InputError(f"--speculative-config: num_speculative_tokens is {given['num_speculative_tokens']!r}")
        args.max_block_size = given["num_speculative_tokens"] + 1
