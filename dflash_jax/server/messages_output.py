"""Answers of ``/v1/messages``: content blocks, and the events that report them."""

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.json_text import loaded
from dflash_jax.server.chat import as_delta
from dflash_jax.server.conversation import Delta, Parser

# Thoughts that clients send back are not verified, so they are not signed.
SIGNATURE = "unsigned"


class Content:
    """The content blocks of an answer as they grow, and the events that report them.

    Attributes:
        blocks: The blocks so far.
    """

    def __init__(self, shows_thoughts: bool = True):
        """An empty content; without ``shows_thoughts`` the text of thinking blocks is left out."""
        self.blocks: list[dict] = []
        self._shows_thoughts = shows_thoughts
        # Parts of the current block's text or arguments.
        self._is_open, self._texts = False, []

    def take(self, delta: Delta) -> list[dict]:
        """Adds a piece.

        Returns:
            Its events.
        """
        events = []
        for part in as_delta(delta):
            if text := part.get("content"):
                events += self._open("text", {"text": ""})
                self._texts.append(text)
                events.append(self._delta("text_delta", text=text))
            elif thought := part.get("reasoning_content"):
                events += self._open("thinking", {"thinking": "", "signature": ""})
                if self._shows_thoughts:
                    self._texts.append(thought)
                    events.append(self._delta("thinking_delta", thinking=thought))
            for call in part.get("tool_calls", ()):
                if name := call["function"].get("name"):
                    events += self.close() + self._open("tool_use", {"id": call["id"], "name": name, "input": {}})
                if arguments := call["function"]["arguments"]:
                    self._texts.append(arguments)
                    events.append(self._delta("input_json_delta", partial_json=arguments))
        return events

    def _open(self, kind: str, fields: dict) -> list[dict]:
        if self._is_open and self.blocks[-1]["type"] == kind:
            return []
        events = self.close()
        self.blocks.append({"type": kind, **fields})
        self._is_open, self._texts = True, []
        start = {"type": "content_block_start", "index": len(self.blocks) - 1}
        # The event gets a copy, since the block still grows.
        return [*events, start | {"content_block": dict(self.blocks[-1])}]

    def _delta(self, kind: str, **fields) -> dict:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}

    def close(self) -> list[dict]:
        """Ends the current block.

        Returns:
            Its events.
        """
        if not self._is_open:
            return []
        self._is_open, block, events, text = False, self.blocks[-1], [], "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta("signature_delta", signature=SIGNATURE))
        return [*events, {"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _object(arguments: str) -> dict:
    """The arguments of a call as an object.

    Text that is no object is wrapped as Anthropic advises clients to wrap it.
    """
    try:
        value = loaded(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def stop_fields(sequence: TextSequence, parser: Parser) -> dict:
    """Why an answer ended."""
    # The interface has no reason for an aborted answer; max_tokens is the nearest.
    reasons = {"length": "max_tokens", "abort": "max_tokens", "tool_calls": "tool_use"}
    reason, matched = reasons.get(parser.reason(sequence) or "", "end_turn"), None
    if isinstance(sequence.matched, str):
        reason, matched = "stop_sequence", sequence.matched
    return {"stop_reason": reason, "stop_sequence": matched}


def usage_fields(sequence: TextSequence, output_tokens: int, reasoning_tokens: int = 0) -> dict:
    """Token counts; ``input_tokens`` are those that were not in the prefix cache."""
    prompt, cached = len(sequence.request.prompt), sequence.request.cached
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": reasoning_tokens},
    }
