"""The options of `dflash serve`, and those of other servers that mean the same."""

import argparse
import logging
import os
import re
import sys

from dflash_jax.aliases import json_object
from dflash_jax.argument_checks import suggestion
from dflash_jax.cli.aliases import AddDraft, add_others
from dflash_jax.cli.arguments import block_size
from dflash_jax.cli.options import Parser, add_hub, add_media, add_mesh, add_platform, program, take_model, with_config
from dflash_jax.errors import InputError
from dflash_jax.frontend.reasoning import CLOSE, OPEN
from dflash_jax.sampling_params import MAX_LOGPROBS
from dflash_jax.server import cors
from dflash_jax.server.additions import Additions

log = logging.getLogger("dflash_jax.server")

DESCRIPTION = """OpenAI's and SGLang's HTTP interfaces for a target and a DFlash drafter. Without arguments:
SmolLM2-135M-Instruct (93 MB, downloaded once) on 127.0.0.1:30000. Launch commands of vLLM and SGLang work with only the
program's name replaced."""


# API keys, which a list of processes does not show.
KEYS_VARIABLE = "DFLASH_API_KEY"
# Of SGLang; what they switch on is always on here.
VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM")


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


class ServerParser(Parser):
    """Flags may be written with underscores, as vLLM's may."""

    def parse_known_args(self, args=None, namespace=None):
        """Parses flags with dashes or underscores."""
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)

    where = "--help lists the options; docs/flags.md lists vLLM's and SGLang's"


def make_parser() -> ServerParser:
    """The parser of `serve`."""
    p = ServerParser(prog=program("serve"), description=DESCRIPTION, allow_abbrev=False)
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
    http.add_argument("--root-path", default="", metavar="/PATH", help="where a proxy serves this server")
    http.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of host and port")
    add_tls(http)
    add_logs(http)

    models = p.add_argument_group("models (as for dflash_jax.generate)")
    models.add_argument("model", nargs="?", metavar="MODEL", help="the target; smollm2 is SmolLM2-135M-Instruct")
    models.add_argument("--bundled", action="store_true", help="the bundled pair of tiny models: no download")
    models.add_argument("--config", metavar="NAME|FILE", help="a name of configs/, or a TOML; options override it")
    text = "target checkpoint (default: SmolLM2 and its drafter, downloaded once; the bundled pair without a network)"
    models.add_argument("--target", metavar="PATH|REPO", help=text)
    models.add_argument(
        "--draft",
        action=AddDraft,
        metavar="PATH|REPO|mtp|none",
        default="auto",
        help="drafter; mtp: the target's own MTP head; none decodes plainly; repeatable",
    )
    add_hub(models)
    models.add_argument("--dtype", help="float32 or bfloat16 (default: float32 on CPU, bfloat16 elsewhere)")
    models.add_argument("--quantize", choices=["none", "int8", "fp8"], help="quantize the target on loading")
    add_mesh(models)
    text = "one of several processes that serve one model, as the cluster's environment says: the first one has HTTP"
    models.add_argument("--distributed", action="store_true", help=text)
    add_platform(models)
    models.add_argument("--reproducible", action="store_true", help="the same bits at any load, in bfloat16 too")

    add_prompts(p)
    media = p.add_argument_group("images and videos")
    add_media(media)
    text = "of a request that may have images and videos (default: %(default)s); text keeps its 10 MiB"
    media.add_argument("--max-media-body", type=int, default=64 * 2**20, metavar="BYTES", help=text)
    add_answers(p)
    load = p.add_argument_group("load")
    load.add_argument(
        "--max-len", type=int, metavar="N", help="most tokens of a request (default: the model's, or what fits)"
    )
    load.add_argument("--slots", type=int, default=32, metavar="N", help="requests at a time (default: %(default)s)")
    load.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="tokens in the caches of all requests and known prefixes (default: as many as fit)",
    )
    load.add_argument("--max-queue", type=int, default=1024, metavar="N", help="requests that wait (default: 1024)")
    load.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step (default: 2048; with Triton 4096)"
    )
    load.add_argument(
        "--mem-fraction", type=float, default=0.9, metavar="F", help="of a device's memory (default: 0.9)"
    )
    load.add_argument(
        "--warm-up",
        choices=["background", "full"],
        default="background",
        help="background: answer as soon as a few programs are compiled, and compile the others beside requests; "
        "full: compile all first (default: %(default)s)",
    )
    load.add_argument(
        "--stream-interval", type=int, default=1, metavar="N", help="tokens between events of a stream (default: 1)"
    )
    text = "of a stream without an event, after which a comment says that it goes on; 0: none (default: %(default)s)"
    load.add_argument("--sse-keep-alive-interval", type=float, default=15.0, metavar="SECONDS", help=text)
    load.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="of a token (default and most: 20)")
    load.add_argument("--prefix-bytes", type=int, metavar="N", help="memory for known prefixes (default: a twentieth)")
    load.add_argument(
        "--prefix-host-bytes",
        type=int,
        metavar="N",
        help="the host's memory for those that the device has no room for (default: a quarter of what is free)",
    )
    load.add_argument(
        "--swap-space",
        type=float,
        metavar="GIB",
        help="the host's memory for each device, for requests whose pages leave it; others compute their tokens again "
        "(default: a quarter of what is free)",
    )

    drafting = p.add_argument_group("drafting")
    drafting.add_argument("--block-size", type=block_size, default="auto", metavar="B", help="1, a number, or auto")
    drafting.add_argument("--max-block-size", type=int, metavar="B", help="the largest that auto takes")
    drafting.add_argument("--draft-window-size", type=int, metavar="W", help="context positions that the drafter sees")
    drafting.add_argument("--draft-sink-size", type=int, default=0, metavar="S", help="first positions it sees besides")
    drafting.add_argument(
        "--draft-tokens", metavar="FILE|none", default="auto", help="JSON list of the only ids that any drafter drafts"
    )

    add_others(p)
    return p


def add_tls(tls) -> None:
    """Adds the options of TLS."""
    tls.add_argument("--ssl-certfile", metavar="FILE", help="PEM with the server's certificate; HTTPS only, then")
    tls.add_argument("--ssl-keyfile", metavar="FILE", help="PEM with its key (default: in the certificate's file)")
    tls.add_argument("--ssl-keyfile-password", metavar="TEXT", help="visible in the process list: prefer a plain key")
    tls.add_argument("--ssl-ca-certs", metavar="FILE", help="PEM with the authorities that sign clients' certificates")
    tls.add_argument(
        "--ssl-cert-reqs", type=int, choices=[0, 1, 2], default=0, help="of clients: 0 none, 1 optional, 2 required"
    )


def add_logs(logs) -> None:
    """Adds the options of logs and traces."""
    logs.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error", "critical"])
    logs.add_argument(
        "--enable-log-requests", action="store_true", help="log ids and sampling parameters of requests, no prompts"
    )
    logs.add_argument(
        "--log-prompts", action="store_true", help="with --enable-log-requests: the prompts' text too, which is private"
    )
    logs.add_argument(
        "--max-log-len", type=int, default=2048, metavar="N", help="characters of a logged prompt (default: 2048)"
    )
    logs.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help='OpenTelemetry spans of requests; needs "dflash-jax[otlp]"'
    )


def add_answers(p: argparse.ArgumentParser) -> None:
    """Adds the options of answers."""
    answers = p.add_argument_group("answers")
    answers.add_argument(
        "--enable-force-include-usage",
        action=argparse.BooleanOptionalAction,
        help="usage in every chunk of a stream, whatever its request says",
    )
    answers.add_argument(
        "--stream-response-default-include-usage",
        action=argparse.BooleanOptionalAction,
        help="usage at the end of every stream",
    )
    answers.add_argument(
        "--enable-per-request-metrics",
        action=argparse.BooleanOptionalAction,
        help="times of a request in its answer, as vLLM's metrics",
    )
    answers.add_argument(
        "--incremental-streaming-output",
        action=argparse.BooleanOptionalAction,
        help="each event of a streamed /generate has what is new, log-probabilities with it",
    )
    answers.add_argument(
        "--return-tokens-as-token-ids",
        action=argparse.BooleanOptionalAction,
        help='log-probabilities name tokens "token_id:N" where the request does not say how',
    )
    answers.add_argument(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        help="X-Request-Id in every answer: the request's own, or a fresh one",
    )


def add_prompts(p: argparse.ArgumentParser) -> None:
    """Adds the options of prompts and of texts."""
    prompts = p.add_argument_group("prompts and defaults")
    prompts.add_argument("--tokenizer", metavar="PATH|REPO", help="default: the target's")
    prompts.add_argument(
        "--chat-template", metavar="FILE|TEXT", help="Jinja, by path or as it is (default: the target's)"
    )
    prompts.add_argument(
        "--default-chat-template-kwargs", type=json_object, metavar="JSON", help='such as {"enable_thinking": false}'
    )
    prompts.add_argument(
        "--generation-config",
        default="auto",
        metavar="auto|vllm|PATH",
        help="sampling defaults: the target's generation_config.json, none, or another (default: auto)",
    )
    prompts.add_argument(
        "--override-generation-config", type=json_object, metavar="JSON", help='such as {"temperature": 0.6}'
    )


def parse(argv: list[str] | None, parser: argparse.ArgumentParser | None = None):
    """Arguments under our names, and the `System` of --config, or None. Raises InputError.

    Args:
        argv: The words; None for those of the process.
        parser: `make_parser`'s, with further options; None for one without.
    """
    args, system = with_config(parser or make_parser(), argv)
    given = vars(args)
    for notice in dict.fromkeys(given.pop("notices", ())):
        log.warning("%s", notice)
    check_thinking_tags(given.pop("reasoning_config", {}))
    for name in VARIABLES:
        if name in os.environ:
            log.warning("%s needs nothing here: the host's work always overlaps the device's", name)
    take_model_from_keys(args)
    take_model(args)
    if args.bundled and args.target is not None:
        raise InputError(f"--bundled and the target {args.target}: give one of them")
    args.dtype = {"auto": None, "half": "float16"}.get(args.dtype, args.dtype)
    leasts = {"max_queue": 0, "max_num_batched_tokens": 16, "drain_s": 0, "response_store": 0, "max_connections": 1}
    leasts |= {
        "max_total_tokens": 1,
        "stream_interval": 1,
        "sse_keep_alive_interval": 0,
        "max_log_len": 1,
        "max_media_body": 1,
        "media_cache_bytes": 0,
    }
    for name, least in leasts.items():
        if getattr(args, name) is not None and not getattr(args, name) >= least:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be {least} or more")
    args.cors = cors.of_arguments(args)
    args.api_keys = api_keys(args)
    if args.max_logprobs < -1:
        raise InputError(f"--max-logprobs {args.max_logprobs}: it must be -1 or more")
    if not 0 <= args.max_logprobs <= MAX_LOGPROBS:
        # vLLM's -1 is the whole vocabulary.
        log.warning("--max-logprobs %d: of a token, at most %d are computed", args.max_logprobs, MAX_LOGPROBS)
        args.max_logprobs = MAX_LOGPROBS
    args.additions = additions_of(args)
    if args.log_prompts and not args.enable_log_requests:
        raise InputError("--log-prompts needs --enable-log-requests")
    if args.root_path and not (args.root_path.startswith("/") and args.root_path.isascii()):
        raise InputError(f"--root-path {args.root_path}: it must begin with /")
    args.root_path = args.root_path.rstrip("/")
    if not 0 <= args.port < 2**16:
        raise InputError(f"--port {args.port}: it must be 0 to 65535")
    return args, system


def take_model_from_keys(args) -> None:
    """``--api-key KEY MODEL``: what is a directory or a repository's name behind the first key is the target."""
    keys = args.api_key or []
    if args.model is None and args.target is None and len(keys) > 1:
        from dflash_jax.checkpoint.smollm2 import is_smollm2

        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", keys[-1])
        if is_name or os.path.isdir(keys[-1]) or is_smollm2(keys[-1]):
            args.model = keys.pop()


def additions_of(args) -> Additions:
    """The fields that answers get beside the asked ones."""
    at_the_end = "at the end" if args.stream_response_default_include_usage else "as asked"
    usage = "always" if args.enable_force_include_usage else at_the_end
    return Additions(
        usage,
        bool(args.enable_per_request_metrics),
        bool(args.return_tokens_as_token_ids),
        bool(args.incremental_streaming_output),
        bool(args.enable_request_id_headers),
    )


def api_keys(args) -> list[str]:
    """All API keys: of the options, the file and the environment. Raises InputError."""
    keys: list[str] = list(args.api_key or ())
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


def check_thinking_tags(config: dict) -> None:
    """Checks the marks of a thought in vLLM's form, of which only Qwen's are possible. Raises InputError."""
    right = {"reasoning_parser": None, "reasoning_start_str": OPEN, "reasoning_end_str": CLOSE}
    for name, value in config.items():
        if name not in right:
            raise InputError(f"--reasoning-config: {name[:40]!r} is not known: {suggestion(name, right)}")
        if right[name] is not None and value not in ("", right[name]):
            message = f"{name} is {str(value)[:40]!r}: only {right[name]!r} is possible"
            raise InputError(f"--reasoning-config: {message}")
