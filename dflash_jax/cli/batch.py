"""A file of requests in OpenAI's batch format, answered as the server answers them.

A line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; its answer is a line
{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. Answers come as they are made. The same
command again goes on where the last one ended. Models, load and drafting: the options of dflash serve. With --urls,
running servers answer, and what one that dies has not answered goes to the others.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from typing import Any

from dflash_jax import progress
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.concurrency import gather_or_cancel
from dflash_jax.frontend.servers import RequestLostError, Servers
from dflash_jax.options import serve
from dflash_jax.options.option import option, options_of
from dflash_jax.options.parser import Parser, program
from dflash_jax.process import INTERRUPTED, exit_code, run_async
from dflash_jax.server.launch import follows, host_of, load, response_store, serving_of

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# The server's options that mean something without a socket.
HTTP_OPTIONS = {"served_model_name", "log_level"}
# Attempts at a request that is answered with 503 while a part of the server restarts.
ATTEMPTS = 5
# Requests that each of --urls has at a time.
CONCURRENCY = 32


@dataclass(frozen=True)
class Response:
    """An answer of a server.

    Attributes:
        status: Its status.
        body: Its body, read as JSON.
        request_id: Its id, if it has one.
    """

    status: int
    body: Any
    request_id: str | None

    @classmethod
    def of(cls, response) -> "Response":
        """That of an `httpx.Response`."""
        try:
            body = response.json()
        except (ValueError, RecursionError):
            # A proxy's page.
            body = {"error": {"message": f"the answer is not JSON: {response.text[:200]!r}"}}
        request_id = response.headers.get("x-request-id")
        if request_id is None and isinstance(body, dict) and isinstance(name := body.get("id"), str):
            request_id = name
        return cls(response.status_code, body, request_id)

    @property
    def error(self) -> str:
        """The message of an error, in the form of OpenAI or of another server."""
        error = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        return str(error["message"] if isinstance(error, dict) and "message" in error else json.dumps(error))

    @property
    def tokens(self) -> int:
        """New tokens, as far as it says so."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        tokens = (usage.get("completion_tokens") or usage.get("output_tokens")) if isinstance(usage, dict) else 0
        return tokens if isinstance(tokens, int) else 0


# Sends a body to an endpoint.
Post = Callable[[str, bytes], Awaitable[Response]]


@dataclass(frozen=True)
class BatchOptions:
    """The options that only `batch` has."""

    input_file: str | None = option(
        None, "requests; - is stdin", "IN.jsonl", flag="-i", further="--input-file", is_required=True
    )
    output_file: str | None = option(
        None, "answers; - is stdout", "OUT.jsonl", flag="-o", further="--output-file", is_required=True
    )
    concurrency: int | None = option(
        None, f"requests at a time (default: --slots; with --urls, of each server: {CONCURRENCY})", "N", least=1
    )
    urls: list[str] | None = option(None, "running servers of one model, such as http://10.0.0.1:30000", "URL")
    api_key: str | None = option(None, "of --urls (default: DFLASH_API_KEY)", "KEY")


def make_parser() -> Parser:
    """The parser of `BatchOptions`."""
    p = Parser(
        prog=program("batch"),
        description=(__doc__ or "").replace("dflash serve", program("serve")),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_options(BatchOptions)
    return p


def parse(argv: list[str] | None):
    """(our arguments, the server's or None, the `System` of --config or None). Raises InputError."""
    batch_args, server_words = make_parser().parse_known_args(argv)
    if batch_args.urls is not None:
        if server_words:
            raise InputError(f"{server_words[0]} is of a server, and those of --urls have started: leave it out")
        batch_args.concurrency = CONCURRENCY if batch_args.concurrency is None else batch_args.concurrency
        return batch_args, None, None
    if batch_args.api_key is not None:
        raise InputError("--api-key is of --urls: give them, or leave it out")
    parser = serve.make_parser()
    parser.others = make_parser()._option_string_actions
    args, system = serve.parse(server_words, parser)
    named = {word.partition("=")[0] for word in server_words}
    for each in options_of(serve.ServeOptions).values():
        if each.group == serve.HTTP and each.name not in HTTP_OPTIONS and each.flag in named:
            raise InputError(f"{each.flag} is about HTTP, and a batch has none: leave it out")
    batch_args.concurrency = args.slots if batch_args.concurrency is None else batch_args.concurrency
    return batch_args, args, system


@asynccontextmanager
async def through_app(serving, app) -> AsyncIterator[Post]:
    """Requests through a server's application, without a socket."""
    import httpx

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http:

        async def post(path: str, content: bytes) -> Response:
            headers = {"Content-Type": "application/json"}
            for attempt in range(ATTEMPTS):
                response = await http.post(path, content=content, headers=headers)
                if serving.failure is not None:
                    raise EngineError(serving.failure)
                if response.status_code != 503:
                    break
                await asyncio.sleep(attempt)
            return Response.of(response)

        yield post


@asynccontextmanager
async def over_http(urls: list[str], concurrency: int, key: str) -> AsyncIterator[Post]:
    """Requests to running servers."""
    async with Servers(urls, concurrency, key) as servers:

        async def post(path: str, content: bytes) -> Response:
            return Response.of(await servers.post(path, content))

        yield post


class Batch:
    """Requests on their way to a server, or to several.

    Args:
        connected: What sends a request, while its context is open.
        output: The `Output`.
        concurrency: Requests at a time.
        bar: The bar of progress.

    Attributes:
        answered: Requests with a good answer.
        errors: Those with another one, and lines that are no requests.
        faults: Such lines.
        lost: Requests without an answer.
        tokens: New tokens.
    """

    def __init__(self, connected: AbstractAsyncContextManager[Post], output, concurrency: int, bar):
        self._connected, self.output, self.concurrency, self.bar = connected, output, concurrency, bar
        self.answered = self.errors = self.faults = self.lost = self.tokens = 0
        self.began = time.perf_counter()

    def feed(self, entries: Iterator, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue) -> None:
        """On a thread of its own, since a pipe may keep it waiting."""
        try:
            for entry in entries:
                self._places.acquire()
                loop.call_soon_threadsafe(queue.put_nowait, entry)
            end = None
        except OSError as e:
            end = InputError(f"the input cannot be read: {e.strerror}")
        except (RuntimeError, ValueError):
            # The loop, or the file, is closed: the run has ended before the input.
            return
        with suppress(RuntimeError):
            for _ in range(self.concurrency):
                loop.call_soon_threadsafe(queue.put_nowait, end)

    async def run(self, entries: Iterator) -> None:
        """Answers all entries."""
        queue: asyncio.Queue = asyncio.Queue()
        # Entries that are read and not yet begun.
        self._places = threading.Semaphore(2 * self.concurrency)
        loop = asyncio.get_running_loop()
        async with self._connected as post:
            threading.Thread(target=self.feed, args=(entries, loop, queue), name="batch-input", daemon=True).start()
            await gather_or_cancel(self._work(post, queue) for _ in range(self.concurrency))

    async def _work(self, post: Post, queue: asyncio.Queue) -> None:
        from dflash_jax.server.batch_files import Fault

        while (entry := await queue.get()) is not None:
            if isinstance(entry, InputError):
                raise entry
            self._places.release()
            if isinstance(entry, Fault):
                self.faults += 1
                self._tell(entry, f"{entry.code}: {entry.message}")
                error = {"code": entry.code, "message": entry.message, "line": entry.line}
                self.output.write(entry.custom_id, None, error)
            else:
                await self._answer(post, entry)
            self.bar.set_postfix_str(f"{self.tokens_per_s:.0f} tok/s", refresh=False)
            self.bar.update()

    async def _answer(self, post: Post, entry) -> None:
        try:
            response = await post(entry.url, entry.body)
        except RequestLostError as e:
            # Nothing is written: the same command sends it again.
            self.lost += 1
            self._tell(entry, f"no answer: {e}")
            return
        if response.status == 200:
            self.answered += 1
            self.tokens += response.tokens
        else:
            self._tell(entry, f"{response.status}: {response.error}")
        value = {"status_code": response.status, "request_id": response.request_id, "body": response.body}
        self.output.write(entry.custom_id, value, None)

    def _tell(self, entry, what: str) -> None:
        self.errors += 1
        text = what.encode("ascii", "backslashreplace").decode()[:300]
        self.bar.write(f"line {entry.line}: {' '.join(text.split())}", file=sys.stderr)

    @property
    def has_no_request(self) -> bool:
        """Whether lines were read and none of them is a request."""
        return 0 < self.faults == self.answered + self.errors

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second so far."""
        return self.tokens / max(time.perf_counter() - self.began, 1e-9)

    def summary(self, before: int) -> str:
        """The line at the end; ``before``: entries that an earlier run answered."""
        return (
            f"{self.answered} answered, {self.errors} errors, {before} done before; {self.tokens} new tokens, "
            f"{self.tokens_per_s:.0f} tok/s"
        )


@contextmanager
def running(host, serving) -> Iterator[None]:
    """The engine, and the processes of grammars, images and videos.

    An interrupt does not wait for the engine's thread: it may be compiling, and the process ends without it.
    """
    is_interrupted = False
    try:
        host.start_workers()
        if serving.media is not None:
            serving.media.start()
        host.set_ready()
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        if not is_interrupted:
            host.engine.stop()
        host.stop_workers()
        serving.stop_workers()


def follow(args, system) -> int:
    """Makes the calls of the first process until it ends: the exit code."""

    def wait(number: int, _) -> None:
        # A signal to all processes has the first one drain, which needs the others until then.
        os.write(2, f"{signal.Signals(number).name}: this process ends with the first one\n".encode())
        signal.signal(number, signal.SIG_DFL)

    llm = load(args, system)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
    with llm.leading():
        return 0


def run(batch_args, args, system) -> int:
    """Answers the requests of a file.

    Args:
        batch_args: The options that only `batch` has.
        args: The server's options; None with ``--urls``.
        system: The system of ``--config``, or None.

    Returns:
        The exit code: 1 where the engine or all servers failed, a request has no answer, or no line is a valid
        request; 130 where the run was interrupted.
    """
    try:
        from dflash_jax.server.app import build
    except ImportError:
        raise InputError('a batch needs the extra of the server: pip install "dflash-jax[server]"') from None
    from dflash_jax.server.batch_files import Output, count_lines, entries, open_input
    from dflash_jax.server.engine_host import in_process
    from dflash_jax.server.limits import Limits

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr, force=True)
    if args is not None and follows(args):
        return follow(args, system)
    with open_input(batch_args.input_file) as stream, Output(batch_args.output_file) as output, ExitStack() as stack:
        if output.is_file(stream):
            raise InputError(f"{batch_args.input_file} is the input and the output: give another -o")
        limits, total, before, most = Limits(), count_lines(stream), len(output.done), batch_args.concurrency
        if args is None:
            key = batch_args.api_key or os.environ.get("DFLASH_API_KEY") or "EMPTY"
            connected, engine = over_http(batch_args.urls, most, key), nullcontext()
            urls, most_bytes, most = frozenset(URLS), limits.media_body_bytes, most * len(batch_args.urls)
        else:
            # No request is refused for a full queue.
            args.max_queue = most * limits.choices * limits.prompts
            store = stack.enter_context(closing(response_store(args)))
            llm = load(args, system)
            stack.enter_context(llm.leading())
            host = host_of(args, llm)
            serving = serving_of(args, llm, in_process(host), store)
            app = build(serving)
            connected, engine = through_app(serving, app), running(host, serving)
            urls = frozenset(URLS) & set(app.openapi()["paths"])
            most_bytes = max(map(serving.most_body_bytes, urls))
        todo, code, reason = entries(stream, most_bytes, urls, output.done), 0, ""
        bar = progress.bar(description="answering", total=total, initial=before, unit="request", leave=True)
        batch = Batch(connected, output, most, bar)
        try:
            with bar, engine:
                run_async(batch.run(todo))
        except KeyboardInterrupt:
            code, reason = INTERRUPTED, "interrupted (the same command goes on): "
        except EngineError as e:
            code, reason = 1, f"{'the engine failed' if args else 'stopped'} ({e}; the same command goes on): "
    if code == 0 and batch.lost:
        code, reason = 1, f"{batch.lost} requests have no answer (the same command sends them again): "
    if code == 0 and batch.has_no_request and not before:
        code, reason = 1, f"{batch_args.input_file} has no valid request: "
    print(f"{reason}{batch.summary(before)}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(*parse(argv)))
