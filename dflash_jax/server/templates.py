"""Chat templates, rendered in processes of their own within limits; `template_worker` describes them."""

import asyncio
import json
from dataclasses import dataclass

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.errors import ApiError
from dflash_jax.server.template_worker import REFUSAL
from dflash_jax.server.worker_loop import framed
from dflash_jax.server.worker_process import Nursery, WorkerProcess

CANNOT_START = "chat templates need transformers and jinja2, which do not start here"


@dataclass(frozen=True)
class TemplateLimits:
    """What chat templates may cost.

    Attributes:
        seconds: Seconds of a processor that a conversation may take.
        wait_s: Seconds on the clock that it may take.
        memory_bytes: Memory that a process may take.
        characters: Characters that a template may write.
        renders: Conversations that are rendered at a time.
        waiting: Requests that may wait for their turn.
    """

    seconds: int = 4
    wait_s: float = 10.0
    memory_bytes: int = 2**28
    characters: int = 2**24
    renders: int = 4
    waiting: int = 256


class Templates:
    """Renders conversations. Processes that have rendered by the checkpoint's own template are kept for the next."""

    def __init__(self, tokenizer: Tokenizer, limits: TemplateLimits = TemplateLimits()):
        self._tokenizer, self.limits = tokenizer, limits
        self._nursery = Nursery("dflash_jax.server.template_worker", {}, CANNOT_START)
        self._idle: list[WorkerProcess] = []
        # Of the checkpoint's own, and of those in requests: these do not delay the former.
        self._places: dict[bool, asyncio.Semaphore] = {}
        self._waiting = 0

    def start(self) -> None:
        """Starts the nursery, which takes a second."""
        self._nursery.start()

    def stop(self) -> None:
        """Ends all processes that are idle, and the nursery, for good."""
        while self._idle:
            self._end(self._idle.pop())
        self._nursery.stop()

    async def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        template: str | None = None,
        ask: bool = True,
        **options,
    ) -> str:
        """A conversation as the template writes it.

        Args:
            messages: As chat templates read them.
            tools: Schemas of functions.
            template: Another template than the checkpoint's.
            ask: Whether the text ends where the answer begins.
            **options: The template's own, and ``continue_final_message``.

        Raises:
            InputError: The template refuses the conversation, or exceeds a limit.
            ApiError: 503, too many wait.
        """
        own = template is None
        template = self._tokenizer.template_for(tools) if own else template
        # Templates write "None" for a key whose value is None.
        kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
        defaults = self._tokenizer.template_options
        arguments = {"tools": tools, "chat_template": template, "add_generation_prompt": ask}
        try:
            wanted = {
                "messages": kept,
                "arguments": self._tokenizer.special_tokens | defaults | options | arguments,
                "is_own": own,
                "memory_bytes": self.limits.memory_bytes,
                "seconds": self.limits.seconds,
                "characters": self.limits.characters,
            }
            request = framed(json.dumps(wanted).encode())
        except RecursionError:
            raise InputError("the conversation is nested too deeply") from None
        if self._waiting >= self.limits.waiting:
            raise ApiError(503, f"{self._waiting} conversations wait to be rendered: try again later")
        self._waiting += 1
        try:
            async with self._places.setdefault(own, asyncio.Semaphore(self.limits.renders)):
                answer = await self._asked(request, own)
        finally:
            self._waiting -= 1
        if answer[:1] == REFUSAL:
            raise InputError(f"the chat template does not take this conversation: {answer[1:].decode()}")
        return answer[1:].decode("utf-8", "surrogatepass")

    async def _asked(self, request: bytes, own: bool) -> bytes:
        """A process' answer. Where the caller stops waiting, the process is ended."""
        loop, process, done = asyncio.get_running_loop(), None, False
        try:
            async with asyncio.timeout(self.limits.wait_s):
                process = await self._process(own)
                await loop.sock_sendall(process.socket, request)
                answer = await process.next()
            done = own
            return answer
        except TimeoutError:
            raise InputError(f"the chat template takes more than {self.limits.wait_s:g} s") from None
        except (EOFError, OSError):
            limits = self.limits
            raise InputError(
                f"the chat template needs more than {limits.seconds} s or {limits.memory_bytes >> 20} MiB"
            ) from None
        finally:
            if process is not None:
                if done:
                    self._idle.append(process)
                else:
                    self._end(process)

    async def _process(self, own: bool) -> WorkerProcess:
        while own and self._idle:
            process = self._idle.pop()
            if not process.has_ended():
                return process
            process.socket.close()
        return await self._nursery.forked()

    def _end(self, process: WorkerProcess) -> None:
        # One that is too young to be killed ends when it reads from its socket; a limit of time ends all others.
        process.kill()
        process.socket.close()
