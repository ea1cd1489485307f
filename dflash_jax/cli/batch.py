"""A file of requests in OpenAI's batch format, answered as the server answers them.

A line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; its answer is a line
{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. Answers come as they are made. The same
command again goes on where the last one ended. Models, load and drafting: the options of dflash serve.
"""

import argparse
import asyncio
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from dflash_jax import progress
from dflash_jax.cli.options import INTERRUPTED, Parser, exit_code, program, run_async
from dflash_jax.cli.serve import assemble, follow, follows, load
from dflash_jax.errors import InputError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# The server's options that mean something without a socket.
HTTP_OPTIONS = {"served_model_name", "log_level"}
# Attempts at a request that is answered with 503 while a part of the server restarts.
ATTEMPTS = 5


def make_parser() -> argparse.ArgumentParser:
    """The parser of the options that only `batch` has."""
    p = Parser(
        prog=program("batch"),
        description=(__doc__ or "").replace("dflash serve", program("serve")),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("-i", "--input-file", required=True, metavar="IN.jsonl", help="requests; - is stdin")
    p.add_argument("-o", "--output-file", required=True, metavar="OUT.jsonl", help="answers; - is stdout")
    p.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (default: --slots)")
    return p


def parse(argv: list[str] | None):
    """(our arguments, the server's, the `System` of --config or None). Raises InputError."""
    from dflash_jax.cli import serve_arguments

    batch_args, server_words = make_parser().parse_known_args(argv)
    args, system = serve_arguments.parse(server_words)
    named = {word.partition("=")[0] for word in server_words}
    for action in next(g for g in serve_arguments.make_parser()._action_groups if g.title == "http")._group_actions:
        if action.dest not in HTTP_OPTIONS and (given := named & set(action.option_strings)):
            raise InputError(f"{min(given)} is about HTTP, and a batch has none: leave it out")
    batch_args.concurrency = args.slots if batch_args.concurrency is None else batch_args.concurrency
    if batch_args.concurrency < 1:
        raise InputError(f"--concurrency {batch_args.concurrency}: it must be 1 or more")
    return batch_args, args, system


class Batch:
    """Requests on their way through the server's application, which has no socket here."""

    def __init__(self, serving, app, output, concurrency: int, bar):
        self.serving, self.app, self.output, self.concurrency, self.bar = serving, app, output, concurrency, bar
        self.answered = self.errors = self.faults = self.tokens = 0
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
        import httpx

        queue: asyncio.Queue = asyncio.Queue()
        # Entries that are read and not yet begun.
        self._places = threading.Semaphore(2 * self.concurrency)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.feed, args=(entries, loop, queue), name="batch-input", daemon=True).start()
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as http:
            tasks = [asyncio.create_task(self._work(http, queue)) for _ in range(self.concurrency)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, http, queue: asyncio.Queue) -> None:
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
                await self._answer(http, entry)
            self.bar.set_postfix_str(f"{self.tokens_per_s:.0f} tok/s", refresh=False)
            self.bar.update()

    async def _answer(self, http, entry) -> None:
        from dflash_jax.engine.engine import EngineError

        headers = {"Content-Type": "application/json"}
        for attempt in range(ATTEMPTS):
            response = await http.post(entry.url, content=entry.body, headers=headers)
            if self.serving.failure is not None:
                raise EngineError(self.serving.failure)
            if response.status_code != 503:
                break
            await asyncio.sleep(attempt)
        body = response.json()
        if response.status_code == 200:
            self.answered += 1
            usage = body.get("usage") or {}
            self.tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        else:
            self._tell(entry, f"{response.status_code}: {body['error']['message']}")
        request_id = response.headers.get("x-request-id") or body.get("id")
        self.output.write(
            entry.custom_id, {"status_code": response.status_code, "request_id": request_id, "body": body}, None
        )

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
def running(serving) -> Iterator[None]:
    """The engine, and the processes of grammars, images and videos.

    An interrupt does not wait for the engine's thread: it may be compiling, and the process ends without it.
    """
    is_interrupted = False
    try:
        for processes in (serving.grammar, serving.media):
            if processes is not None:
                processes.start()
        serving.engine.start()
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        if not is_interrupted:
            serving.engine.stop()
        serving.stop_workers()


def run(batch_args, args, system) -> int:
    """Answers the requests of a file.

    Args:
        batch_args: The options that only `batch` has.
        args: The server's options.
        system: The system of ``--config``, or None.

    Returns:
        The exit code: 1 where the engine failed or no line is a valid request, 130 where the run was interrupted.
    """
    from dflash_jax.engine.engine import EngineError

    try:
        from dflash_jax.server.app import build
    except ImportError:
        raise InputError('a batch needs the extra of the server: pip install "dflash-jax[server]"') from None
    from dflash_jax.server.batch_files import Output, count_lines, entries, open_input
    from dflash_jax.server.limits import Limits

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr, force=True)
    if follows(args):
        return follow(args, system)
    with open_input(batch_args.input_file) as stream, Output(batch_args.output_file) as output, ExitStack() as turn:
        if output.is_file(stream):
            raise InputError(f"{batch_args.input_file} is the input and the output: give another -o")
        limits, total, before = Limits(), count_lines(stream), len(output.done)
        # No request is refused for a full queue.
        args.max_queue = batch_args.concurrency * limits.choices * limits.prompts
        llm = load(args, system)
        turn.enter_context(llm.leading())
        serving = assemble(args, llm)
        serving.is_ready, app = True, build(serving)
        urls = frozenset(URLS) & set(app.openapi()["paths"])
        todo = entries(stream, max(map(serving.most_body_bytes, urls)), urls, output.done)
        code, reason = 0, ""
        bar = progress.bar(description="answering", total=total, initial=before, unit="request", leave=True)
        batch = Batch(serving, app, output, batch_args.concurrency, bar)
        try:
            with bar, running(serving):
                run_async(batch.run(todo))
        except KeyboardInterrupt:
            code, reason = INTERRUPTED, "interrupted (the same command goes on): "
        except EngineError as e:
            code, reason = 1, f"the engine failed ({e}; the same command goes on): "
    if code == 0 and batch.has_no_request and not before:
        code, reason = 1, f"{batch_args.input_file} has no valid request: "
    print(f"{reason}{batch.summary(before)}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code(lambda: run(*parse(argv)))
