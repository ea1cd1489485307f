"""Answers of ``/v1/responses``: the response object, its items, and the events that report them."""

from collections.abc import Iterable

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import responses_schema
from dflash_jax.server.answers import chat_logprobs, usage
from dflash_jax.server.conversation import Delta
from dflash_jax.server.request_context import fresh_id
from dflash_jax.server.tools import CallDelta


def _id(kind: str) -> str:
    return f"{kind}_{fresh_id()}"


class Output:
    """The items of an answer as they grow, and the events that report them.

    Attributes:
        items: The items so far.
    """

    def __init__(self, tokenizer):
        self._tokenizer, self.items = tokenizer, []
        self._kind: str | None = None
        self._logprobs: list[dict] = []
        # Parts of the current item's text or arguments.
        self._texts: list[str] = []

    def take(self, delta: Delta, logprobs: list[dict] | None) -> list[dict]:
        """Adds a piece.

        Args:
            delta: The parsed piece.
            logprobs: Log-probabilities of its tokens; None where they are not asked for.

        Returns:
            Its events.
        """
        # Log-probabilities of tokens whose text is held back wait for the text.
        self._logprobs += logprobs or ()
        # Arguments of a call that has begun precede content.
        first_new = next((i for i, call in enumerate(delta.calls) if call.name is not None), len(delta.calls))
        events = self._take_calls(delta.calls[:first_new])
        if delta.reasoning:
            events += self._open("reasoning") + self._grow("reasoning_text", delta.reasoning)
        if delta.content:
            events += self._open("message")
            events += self._grow("output_text", delta.content, chat_logprobs(self._tokenizer, self._logprobs))
        if delta.content or delta.reasoning or delta.calls:
            self._logprobs = []
        return events + self._take_calls(delta.calls[first_new:])

    def _take_calls(self, calls: list[CallDelta]) -> list[dict]:
        events = []
        for call in calls:
            if call.name is not None:
                events += self.close() + self._open("function_call", call)
            if call.arguments:
                self._texts.append(call.arguments)
                events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _event(self, kind: str, **values) -> dict:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}

    def _open(self, kind: str, call: CallDelta | None = None) -> list[dict]:
        if self._kind == kind and call is None:
            return []
        events = self.close()
        self._kind, self._texts, part = kind, [], None
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "status": "in_progress", "content": []}
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": kind, "summary": [], "status": "in_progress", "content": []}
        else:
            assert call is not None, kind
            item = {"id": _id("fc"), "type": kind, "call_id": call.id, "name": call.name, "arguments": ""}
            item["status"] = "in_progress"
        self.items.append(item)
        added = {"type": "response.output_item.added", "output_index": len(self.items) - 1}
        # The event gets a copy, since the item still grows.
        events.append(added | {"item": dict(item) | ({"content": []} if part else {})})
        if part:
            item["content"].append(part)
            copied = part | ({"logprobs": []} if kind == "message" else {})
            events.append(self._event("response.content_part.added", content_index=0, part=copied))
        return events

    def _grow(self, kind: str, text: str, logprobs: Iterable[bytes] = ()) -> list[dict]:
        self._texts.append(text)
        more = {}
        if kind == "output_text":
            more["logprobs"] = list(logprobs)
            self.items[-1]["content"][0]["logprobs"] += more["logprobs"]
        return [self._event(f"response.{kind}.delta", content_index=0, delta=text, **more)]

    def close(self, status: str = "completed") -> list[dict]:
        """Ends the current item.

        Returns:
            Its events.
        """
        if self._kind is None:
            return []
        item, self._kind = self.items[-1], None
        item["status"] = status
        events, text = [], "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        else:
            part = item["content"][0]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", content_index=0, text=text, **more))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]


def envelope(
    body: responses_schema.ResponsesRequest, name: str, response_id: str, created: int, is_stored: bool
) -> dict:
    """A response before its output is known."""
    choice = body.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model or name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": is_stored,
        "temperature": body.temperature,
        "text": body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {"format": {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [t.model_dump() for t in body.tools or ()],
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def final_value(value: dict, output: Output, sequence: TextSequence, reasoning_tokens: int) -> dict:
    """The response of a finished sequence."""
    is_complete, reason = sequence.request.finish_reason == "stop", sequence.request.finish_reason
    tokens = usage([sequence], 1)
    return {
        **value,
        "status": "completed" if is_complete else "incomplete",
        "incomplete_details": None
        if is_complete
        else {"reason": "max_output_tokens" if reason == "length" else reason},
        "output": output.items,
        "usage": {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": tokens["prompt_tokens_details"],
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": tokens["completion_tokens_details"] | {"reasoning_tokens": reasoning_tokens},
            "total_tokens": tokens["total_tokens"],
        },
    }
