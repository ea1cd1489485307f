"""The options of `dflash serve`."""

import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import partial

from dflash_jax.errors import InputError
from dflash_jax.options import readers
from dflash_jax.options.option import Add, Alias, option
from dflash_jax.options.others import add_others
from dflash_jax.options.parser import Parser, program
from dflash_jax.options.shared import CommandOptions, LLMOptions, take_model
from dflash_jax.options.systems import with_config
from dflash_jax.sampling_params import MAX_LOGPROBS

log = logging.getLogger("dflash_jax.server")

DESCRIPTION = """OpenAI's and SGLang's HTTP interfaces for a target and a DFlash drafter. Without arguments:
SmolLM2-135M-Instruct (93 MB, downloaded once) on 127.0.0.1:30000. Launch commands of vLLM and SGLang work with only the
program's name replaced."""
# API keys, which a list of processes does not show.
KEYS_VARIABLE, ADMIN_VARIABLE = "DFLASH_API_KEY", "DFLASH_ADMIN_API_KEY"
# Of SGLang; what they switch on is always on here.
VARIABLES = ("SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM")
# vLLM's and SGLang's names of how a model writes calls: Qwen's XML or JSON between tags, or JSON without them.
TOOL_CALL_PARSERS = {
    **dict.fromkeys(("xml", "qwen3_coder", "qwen3_xml"), "xml"),
    **dict.fromkeys(("json", "hermes", "qwen", "qwen25", "qwen3"), "json"),
    **dict.fromkeys(("llama3_json", "llama3", "llama4_json"), "bare"),
}
# Their names of how it writes thoughts: between tags (False), or from the beginning of every answer (True).
REASONING_PARSERS = {
    **dict.fromkeys(("tags", "qwen3", "qwen3-nothink", "glm45"), False),
    **dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3-thinking"), True),
}
# The group of options that a server without a socket does not have.
HTTP = "http"
_http, _answers, _load = (partial(option, group=title) for title in (HTTP, "answers", "load"))


@dataclass(frozen=True)
class ServeOptions(LLMOptions, CommandOptions):
    """The options of `dflash serve`."""

    bundled: bool = option(False, "the bundled pair of tiny models: no download", group="models")
    host: str = _http("127.0.0.1", "0.0.0.0 for all networks")
    port: int = _http(30000, "0 takes a free one", least=0, most=2**16 - 1)
    api_key: list[str] | None = _http(
        None,
        "what clients must send, one of them (default: no key); other users see it in the list of processes, but not "
        f"those in --api-key-file or {KEYS_VARIABLE} (separated by commas)",
        "KEY",
        action=Add,
    )
    api_key_file: str | None = _http(None, "API keys, one a line", "FILE")
    admin_api_key: list[str] | None = _http(
        None,
        "a key for pausing the server and giving it new weights (default: no key does); other users see it as they see "
        f"--api-key, but not in --admin-api-key-file or {ADMIN_VARIABLE}",
        "KEY",
        action=Add,
    )
    admin_api_key_file: str | None = _http(None, "such keys, one a line", "FILE")
    allowed_hosts: str | None = _http(
        None,
        "names that clients may ask for, *.example.com for a domain, * for any (default: with --host 127.0.0.1 local "
        "names, which no other site's page can use, otherwise any)",
        "NAME,...",
    )
    api_server_count: int | None = _http(
        None,
        "processes that answer HTTP beside the engine's (default: one for four processor cores, at least 1 and at most "
        "4)",
        "N",
        least=1,
        aliases="-asc",
    )
    max_connections: int = _http(4096, "connections at a time", "N", least=1)
    served_model_name: list[str] | None = _http(None, "default: the target as given", "NAME")
    unknown_fields: str = _http("refuse", "of requests", choices=("refuse", "warn"))
    trust_request_chat_template: bool = _http(False, "let requests bring a chat_template of their own")
    allowed_origins: list[str] | None = _http(
        None,
        "of which pages may use the server, such as https://app.example, or * (default: of none but its own)",
        "ORIGIN",
    )
    allowed_methods: list[str] | None = _http(None, "of such pages (default: all)", "METHOD")
    allowed_headers: list[str] | None = _http(None, "of such pages (default: all)", "HEADER")
    allow_credentials: bool = _http(False, "cookies of such pages, too")
    drain_s: float = _http(30.0, "seconds after SIGTERM", "S", least=0, aliases="--shutdown-timeout")
    response_store: int = _http(1024, "responses kept for later turns", "N", least=0)
    response_store_path: str | None = _http(
        None, "the SQLite file that keeps them, also for several servers (default: a temporary one)", "FILE"
    )
    exit_on_failure: bool = _http(False, "exit with code 1 when the device has failed (default: stay, 503)")
    restart_on_failure: bool = _http(False, "restart the engine, empty, after the first failure")
    root_path: str = _http("", "where a proxy serves this server", "/PATH", aliases="--fastapi-root-path")
    uds: str | None = _http(None, "listen on a Unix socket instead of host and port", "PATH")
    ssl_certfile: str | None = _http(None, "PEM with the server's certificate; HTTPS only, then", "FILE")
    ssl_keyfile: str | None = _http(None, "PEM with its key (default: in the certificate's file)", "FILE")
    ssl_keyfile_password: str | None = _http(None, "visible in the process list: prefer a plain key", "TEXT")
    ssl_ca_certs: str | None = _http(None, "PEM with the authorities that sign clients' certificates", "FILE")
    ssl_cert_reqs: int = _http(0, "of clients: 0 none, 1 optional, 2 required", choices=(0, 1, 2))
    log_level: str = _http(
        "info",
        "of lines on stderr",
        choices=("debug", "info", "warning", "error", "critical"),
        aliases="--uvicorn-log-level",
    )
    enable_log_requests: bool = _http(
        False,
        "log ids and sampling parameters of requests, no prompts",
        aliases=(Alias("--log-requests", const=True), Alias("--no-enable-log-requests", const=False)),
    )
    log_prompts: bool = _http(False, "with --enable-log-requests: the prompts' text too, which is private")
    max_log_len: int = _http(2048, "characters of a logged prompt", "N", least=1)
    otlp_traces_endpoint: str | None = _http(
        None,
        'OpenTelemetry spans of requests; needs "dflash-jax[otlp]"',
        "URL",
        aliases=Alias("--enable-trace", const="http://localhost:4317"),
    )
    max_media_body: int = option(
        64 * 2**20,
        "of a request that may have images and videos; text keeps its 10 MiB",
        "BYTES",
        group="images and videos",
        least=1,
    )
    enable_force_include_usage: bool | None = _answers(
        None, "usage in every chunk of a stream, whatever its request says"
    )
    stream_response_default_include_usage: bool | None = _answers(None, "usage at the end of every stream")
    enable_per_request_metrics: bool | None = _answers(None, "times of a request in its answer, as vLLM's metrics")
    per_request_spec_decode_metrics: str = _answers(
        "none", "counts of a request's drafts in its answer, as vLLM's metrics", choices=("none", "summary", "detailed")
    )
    incremental_streaming_output: bool | None = _answers(
        None, "each event of a streamed /generate has what is new, log-probabilities with it"
    )
    return_tokens_as_token_ids: bool | None = _answers(
        None, 'log-probabilities name tokens "token_id:N" where the request does not say how'
    )
    enable_request_id_headers: bool | None = _answers(
        None, "X-Request-Id in every answer: the request's own, or a fresh one"
    )
    tool_call_parser: str | None = _answers(
        None,
        "how the model writes calls, for tool_choice and for texts without tags (default: as the chat template shows); "
        "Qwen's two forms are read beside each other in any case",
        choices=tuple(TOOL_CALL_PARSERS),
    )
    reasoning_parser: str | None = _answers(
        None,
        "how it writes thoughts: between tags, or from the beginning of every answer (default: as the chat template "
        "shows)",
        choices=tuple(REASONING_PARSERS),
    )
    require_answer: bool = _answers(
        False, "no chat ends inside its thought or without a text or call; a request's own field goes first"
    )
    json_whitespace: str | None = _answers(
        None,
        "regular expression of blanks between two tokens of JSON that has a form, '' for none (default: at most 64); a "
        "request's own field goes first",
        "REGEX",
        read=readers.expression,
        aliases=(
            Alias("--constrained-json-whitespace-pattern", readers.expression),
            Alias("--constrained-json-disable-any-whitespace --guided-decoding-disable-any-whitespace", const=""),
            Alias("--structured-outputs-config", readers.structured_outputs),
            Alias(
                "--structured-outputs-config.disable-any-whitespace",
                readers.one_of({"true": "", "false": None}, ": it must be true or false"),
            ),
        ),
    )
    max_total_tokens: int | None = _load(
        None, "tokens in the caches of all requests and known prefixes (default: as many as fit)", "N", least=1
    )
    max_queue: int = _load(
        1024,
        "requests that wait; each client has room for its share",
        "N",
        least=0,
        aliases="--max-queued-requests --max-num-queued-reqs",
    )
    trust_priority: bool = _load(
        False, "priorities order the requests of all clients (default: those of one client, and clients take turns)"
    )
    max_num_batched_tokens: int | None = _load(
        None,
        "tokens of a step (default: 2048; with Triton 4096)",
        "N",
        least=16,
        aliases=Alias("--chunked-prefill-size", readers.chunk),
    )
    warm_up: str = _load(
        "background",
        "background: answer as soon as a few programs are compiled, and compile the others beside requests; full: "
        "compile all first",
        choices=("background", "full"),
    )
    stream_interval: int = _load(1, "tokens between events of a stream", "N", least=1)
    sse_keep_alive_interval: float = _load(
        15.0, "of a stream without an event, after which a comment says that it goes on; 0: none", "SECONDS", least=0
    )
    max_logprobs: int = _load(
        MAX_LOGPROBS, f"of a token, at most {MAX_LOGPROBS}; -1: as many as there are", "N", least=-1
    )


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
    p = ServerParser(prog=program("serve"), description=DESCRIPTION)
    p.add_options(ServeOptions)
    text = "Most are understood; docs/flags.md says what each does."
    others = p.add_argument_group("flags of vLLM and SGLang", text)
    p.add_aliases(ServeOptions, others)
    add_others(others)
    return p


def parse(argv: list[str] | None, parser: Parser | None = None):
    """Arguments under our names, and the `System` of --config, or None. Raises InputError.

    Args:
        argv: The words; None for those of the process.
        parser: `make_parser`'s, with further options; None for one without.
    """
    args, system = with_config(parser or make_parser(), argv)
    for notice in dict.fromkeys(vars(args).pop("notices", ())):
        log.warning("%s", notice)
    for name in VARIABLES:
        if name in os.environ:
            log.warning("%s needs nothing here: the host's work always overlaps the device's", name)
    take_model_from_keys(args)
    take_model(args)
    if args.bundled and args.target is not None:
        raise InputError(f"--bundled and the target {args.target}: give one of them")
    args.api_keys = keys_of(args, "api_key", KEYS_VARIABLE)
    args.admin_api_keys = keys_of(args, "admin_api_key", ADMIN_VARIABLE)
    if not 0 <= args.max_logprobs <= MAX_LOGPROBS:
        # vLLM's -1 is the whole vocabulary.
        log.warning("--max-logprobs %d: of a token, at most %d are computed", args.max_logprobs, MAX_LOGPROBS)
        args.max_logprobs = MAX_LOGPROBS
    if args.log_prompts and not args.enable_log_requests:
        raise InputError("--log-prompts needs --enable-log-requests")
    if args.root_path and not (args.root_path.startswith("/") and args.root_path.isascii()):
        raise InputError(f"--root-path {args.root_path}: it must begin with /")
    args.root_path = args.root_path.rstrip("/")
    # Other processes of a cluster may have another working directory.
    args.response_store_path = args.response_store_path and os.path.abspath(args.response_store_path)
    if args.exit_on_failure and args.restart_on_failure:
        raise InputError("--exit-on-failure and --restart-on-failure: give one of them")
    return args, system


def take_model_from_keys(args) -> None:
    """``--api-key KEY MODEL``: what is a directory or a repository's name after the first key is the target."""
    keys = args.api_key or []
    if args.model is None and args.target is None and len(keys) > 1:
        from dflash_jax.checkpoint.smollm2 import is_smollm2

        is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", keys[-1])
        if is_name or os.path.isdir(keys[-1]) or is_smollm2(keys[-1]):
            args.model = keys.pop()


def keys_of(args, dest: str, variable: str) -> list[str]:
    """All API keys of a kind: of the option ``dest``, its file and the environment. Raises InputError."""
    keys: list[str] = list(getattr(args, dest) or ())
    option, path = f"--{dest.replace('_', '-')}", getattr(args, f"{dest}_file")
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as e:
            reason = getattr(e, "strerror", None) or "it is not UTF-8"
            raise InputError(f"{option}-file {path}: {reason}") from None
        if not any(lines):
            raise InputError(f"{option}-file {path} has no key")
        keys += filter(None, lines)
    if (given := os.environ.get(variable)) is not None:
        keys += [key.strip() for key in given.split(",")]
    if not all(keys):
        raise InputError(f"an API key is empty: leave out {option} and {variable} to need none")
    if any(not (key.isascii() and key.isprintable()) or " " in key for key in keys):
        raise InputError("an API key has a character that HTTP cannot send: use letters, digits and signs")
    return keys
