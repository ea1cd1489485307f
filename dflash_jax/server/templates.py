"""Chat templates, rendered in separate processes within limits; see `template_worker`."""

import json
from dataclasses import dataclass

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.template_worker import REFUSAL
from dflash_jax.workers.process import Nursery, WorkerProcess

CANNOT_START = "chat templates need transformers and jinja2, which do not start here"


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of chat templates.

    Attributes:
        seconds: Seconds of processor time of a conversation.
        memory_bytes: Memory of a process.
        characters: Characters of a rendered conversation.
        renders: Conversations that are rendered at a time.
        waiting: Requests that may wait.
    """

    seconds: int = 4
    memory_bytes: int = 2**28
    characters: int = 2**24
    renders: int = 6
    waiting: int = 256


class Templates:
    """Renders conversations. Processes that rendered with the checkpoint's template are reused.

    Attributes:
        limits: The limits.
    """

    def __init__(self, tokenizer: Tokenizer, limits: TemplateLimits = TemplateLimits()):
        self._tokenizer, self.limits = tokenizer, limits
        self._nursery = Nursery("dflash_jax.server.template_worker", {}, CANNOT_START)
        self._idle: list[WorkerProcess] = []
        # Places for the checkpoint's template (True) and for templates of requests (False): neither delays the other.
        self._places = {
            True: FairCapacity(limits.renders, "the chat template", limits.waiting),
            False: FairCapacity(limits.renders, "the chat templates of requests", limits.waiting),
        }

    def start(self) -> None:
        """Starts the nursery, which takes a second."""
        self._nursery.start()

    def stop(self) -> None:
        """Ends the nursery and all idle processes, for good."""
        while self._idle:
            self._idle.pop().end()
        self._nursery.stop()

    async def render(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        template: str | None = None,
        ask: bool = True,
        **options,
    ) -> str:
        """Renders a conversation.

        Args:
            messages: Messages in the form that chat templates read.
            tools: Schemas of functions.
            template: A template in place of the checkpoint's.
            ask: Whether the text ends where the answer begins.
            **options: Variables of the template, and ``continue_final_message``.

        Raises:
            InputError: The template refuses the conversation, or exceeds a limit.
            ApiError: 503, too many requests wait.
        """
        is_default = template is None
        template = self._tokenizer.template_for(tools) if is_default else template
        # Templates write "None" for a key whose value is None.
        cleaned = [{key: value for key, value in message.items() if value is not None} for message in messages]
        defaults = self._tokenizer.template_options
        arguments = {"tools": tools, "chat_template": template, "add_generation_prompt": ask}
        try:
            fields = {
                "messages": cleaned,
                "arguments": self._tokenizer.special_tokens | defaults | options | arguments,
                "is_default": is_default,
                "memory_bytes": self.limits.memory_bytes,
                "seconds": self.limits.seconds,
                "characters": self.limits.characters,
            }
            request = json.dumps(fields).encode()
        except RecursionError:
            raise InputError("the conversation is nested too deeply") from None
        with await self._places[is_default].take(1):
            answer = await self._answer(request, is_default)
        if answer[:1] == REFUSAL:
            raise InputError(f"the chat template does not take this conversation: {answer[1:].decode()}")
        return answer[1:].decode("utf-8", "surrogatepass")

    async def _answer(self, request: bytes, is_default: bool) -> bytes:
        """Asks a process, which is ended where the caller is cancelled."""
        process, is_reusable = None, False
        try:
            process = await self._process(is_default)
            answer = await process.ask(request)
            is_reusable = is_default
            return answer
        except (EOFError, OSError):
            limits = self.limits
            bounds = f"{limits.seconds} s of processor time or {limits.memory_bytes >> 20} MiB"
            raise InputError(f"the chat template needs more than {bounds}") from None
        finally:
            if process is not None:
                if is_reusable:
                    self._idle.append(process)
                else:
                    process.end()

    async def _process(self, is_default: bool) -> WorkerProcess:
        while is_default and self._idle:
            process = self._idle.pop()
            if not process.has_ended():
                return process
            process.socket.close()
        return await self._nursery.forked()
