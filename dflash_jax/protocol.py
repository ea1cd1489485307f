"""Records between fronts and engines: requests as tokens go one way, the tokens of their rounds the other.

A front speaks HTTP and text; an engine knows tokens. Records are msgpack on a stream (`server.wire`), or objects where
both are in one process. A front numbers its requests and its calls; an engine's records name them by these numbers.
"""

import json
from typing import Any

import msgspec
import numpy as np

from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.media import UnencodedMedia
from dflash_jax.engine.request import FIRST_VERSION, Times
from dflash_jax.engine.token_rules import ThinkingBudget
from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError
from dflash_jax.sampling_params import SamplingParams

# Longest schema, regular expression or grammar, in characters.
MOST_CHARACTERS = 65536
# Steps of images and videos before a request is submitted, as `Prompt.preparation` counts their seconds.
MEDIA_STEPS = {
    "fetch": "Images and videos of a request: all fetched.",
    "decode": "Images and videos of a request: all decoded.",
    "tower": "Images and videos of a request: all encoded by the vision tower.",
}


class Record(msgspec.Struct, tag=True, array_like=True):
    """A message."""


class Part(msgspec.Struct, array_like=True):
    """A part of a message."""


class Form(msgspec.Struct, array_like=True, frozen=True):
    """The form that a text must have.

    Attributes:
        kind: "json" (any object), "schema", "regex", "grammar" (EBNF: GBNF's or Lark's), "choice", "structural_tag",
            "calls", or "inputs": a free text with calls of custom tools.
        value: Its value as JSON; its type depends on the kind.
        field: The request's field, for errors.
        blanks: Regular expression of the blanks between two tokens of JSON, "" for none; None: the default.
    """

    kind: str
    value: str
    field: str
    blanks: str | None = None

    @property
    def begins(self) -> bool:
        """Whether the text has the form from its beginning, or the end of its thought, to its end."""
        return self.kind != "inputs"

    @classmethod
    def of(cls, kind: str, value: Any, field: str) -> "Form":
        """The form of a value of JSON's types.

        Raises:
            InputError: It is too long, or nested too deeply.
        """
        try:
            # Keys are not sorted: the grammar follows the order of a schema's properties.
            text = json.dumps(value)
        except RecursionError:
            raise InputError(f"{field} is nested too deeply") from None
        length = len(value if isinstance(value, str) else text)
        if length > MOST_CHARACTERS:
            raise InputError(f"{field} has {length} characters: at most {MOST_CHARACTERS} are possible")
        return cls(kind, text, field)


class CallEnd(msgspec.Struct, array_like=True, frozen=True):
    """A text that ends after its first tool call.

    Attributes:
        is_thinking: Whether the text begins inside a thought.
        is_bare: Whether calls are JSON without tags.
        tools: JSON schema of each tool's parameters, by name, as JSON.
        is_forced: Whether the text consists of calls only.
        only_at_start: Whether it has calls only where it begins with one.
    """

    is_thinking: bool
    is_bare: bool
    tools: str
    is_forced: bool
    only_at_start: bool = False


class Choice(Part):
    """One continuation of a prompt.

    Attributes:
        number: Names the request in later records.
        name: The id that clients know.
        seed: Of its sampling.
        tokens: New tokens of an earlier engine, which was lost; the request goes on after them.
        losses: How many engines have lost it.
    """

    number: int
    name: str
    seed: int
    tokens: list[int]
    losses: int = 0


class Prompt(Part):
    """A prompt and how it is continued: the arguments of `Prompts.new_sequence`.

    Attributes:
        ids: Token ids, int32, which are not encoded one by one.
        params: Fields of `SamplingParams`.
        block_size: Tokens that a round may yield, or "auto".
        priority: Lower values go first, of one client.
        cache_salt: Only prompts with the same salt share prefixes.
        form: The text's form; None: any.
        thought: Where reasoning stands when the text begins: "open", "possible" or "none".
        budget: The bound of the thought.
        records_drafts: Whether events have the drafts of each round.
        ends: What ends a text beside its stop strings.
        media: Images and videos; None for text.
        preparation: Seconds of steps before the request, by name.
        choices: Its continuations.
    """

    ids: np.ndarray
    params: dict[str, Any]
    block_size: BlockSize
    priority: int = 0
    cache_salt: str = ""
    form: Form | None = None
    thought: str = "none"
    budget: ThinkingBudget | None = None
    records_drafts: bool = False
    ends: CallEnd | None = None
    media: UnencodedMedia | None = None
    preparation: dict[str, float] = {}
    choices: list[Choice] = []

    def without_choices(self) -> "Prompt":
        """The same prompt, to which continuations are added."""
        return msgspec.structs.replace(self, choices=[])


# What a front sends.


class Submit(Record):
    """Requests, of which the engine takes all or none.

    Attributes:
        number: Of the call, which `Answered` or `Failed` answers.
        client: Who shares capacities by turns.
        owner: A digest of the key: who may abort the requests.
        prompts: The prompts with their continuations.
        beginnings: Hashes of the first prompt's beginnings, or a digest of a session, which `Begun` tells other fronts.
    """

    number: int
    client: str | None
    owner: bytes
    prompts: list[Prompt]
    beginnings: list[int | bytes] = []


class Compile(Record):
    """Compiles the form of a text, which a prompt will have; `Answered` or `Failed` answers."""

    number: int
    client: str | None
    form: Form


class Leave(Record):
    """The front waits neither for the answer to a call, nor for the events of its requests.

    Attributes:
        number: Of the call.
        requests: Of requests that have not ended.
    """

    number: int
    requests: list[int]


class Abort(Record):
    """Ends all requests of an owner, of any front; with a name only those of that name."""

    owner: bytes
    name: str | None


class Manage(Record):
    """Changes the weights of the engine, pauses it, or takes its memory; `Answered` or `Failed` answers.

    Attributes:
        number: Of the call.
        action: A method of `server.management.Management`.
        arguments: Its arguments, by name.
        tensors: The bytes of a safetensors file, where the action has such; uint8.
    """

    number: int
    action: str
    arguments: dict[str, Any]
    tensors: np.ndarray | None = None


class Ask(Record):
    """Asks for "figures" or "metrics", to "flush" or "reset" prefixes, or whether the engine does "generate".

    `Answered` or `Failed` answers.
    """

    number: int
    question: str


# What an engine sends.


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An exception.

    Attributes:
        kind: One of `FAILURES`, or "api" for an answer with a status.
        message: Its text.
        status: The status of an "api" error.
        field: The request's field that it names.
    """

    kind: str
    message: str
    status: int = 0
    field: str | None = None


class Hello(Record):
    """The first record of an engine.

    Attributes:
        capacity: Positions of a request.
        largest_block: The largest block size; 1 without a drafter.
        has_masks: Whether there are programs for structured output.
        model: What a front must know of the model, by name.
        info: What /server_info shows beside the counters.
    """

    capacity: int
    largest_block: int
    has_masks: bool
    model: dict[str, Any]
    info: dict[str, Any]


class State(Record):
    """Whether the engine takes requests, and why it has failed; sent whenever something of it changes.

    Attributes:
        is_ready: Whether the warm-up has ended.
        failure: Why it has failed; None while it works.
        version: The version of its weights.
        rest: "paused" or "sleeping" where nothing is generated until an administrator says so; else "".
        refuses: Whether requests are refused meanwhile.
    """

    is_ready: bool
    failure: str | None
    version: str = FIRST_VERSION
    rest: str = ""
    refuses: bool = False


class Begun(Record):
    """The engine has requests of another front.

    Attributes:
        requests: Requests that it has, of all fronts.
        beginnings: Of these requests: what comes after them belongs here.
    """

    requests: int
    beginnings: list[int | bytes]


class Answered(Record):
    """The answer to a call.

    Attributes:
        number: Of the call.
        value: To an `Ask`, what the question asks for. To a `Submit`, whose requests the engine has then: for each
            prompt, seconds of the vision tower. To a `Compile`: parts of the schema that the form does not enforce.
    """

    number: int
    value: Any


class Failed(Record):
    """A call failed."""

    number: int
    failure: Failure


class Event(Part):
    """What a dispatch brought to a request; the last one has a finish_reason or a failure.

    Attributes:
        number: Of the request.
        tokens: New tokens.
        yielded: Tokens that each round yielded.
        drafted: Drafts that each round verified; empty where none has any.
        drafter: The name of the drafter.
        finish_reason: With the last event, why the request ended.
        failure: What ended it, in place of a finish_reason or with the finish_reason "error".
        logprobs: As in the engine's `Event`.
        proposals: Where recorded, the drafts of each round.
        times: When the request reached each stage, where that is new.
        cached: Prompt tokens that came from the prefix cache; with the first event.
        version: The version of the weights that drew the tokens; None: as of the event before.
    """

    number: int
    tokens: list[int] = []
    yielded: list[int] = []
    drafted: list[int] = []
    drafter: str | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    logprobs: list[dict[str, Any]] | None = None
    proposals: list[list[int]] | None = None
    times: Times | None = None
    cached: int = 0
    version: str | None = None


class Scores(Record):
    """Log-probabilities of a prompt's next tokens, as in the engine's `Request.prompt_entries`; before its events.

    Attributes:
        number: Of the request.
        entries: The log-probabilities.
    """

    number: int
    entries: list[dict[str, Any]]


class Events(Record):
    """Events of a step.

    Attributes:
        clock: The engine's clock, in seconds.
        plain_round_s: Measured seconds of a plain round with as many sequences as run now; None: not measured.
        events: The events.
    """

    clock: float
    plain_round_s: float | None
    events: list[Event]


FromFront = Submit | Compile | Leave | Abort | Manage | Ask
FromEngine = Hello | State | Begun | Answered | Failed | Scores | Events

# The exceptions that cross, by kind.
FAILURES: dict[str, type[Exception]] = {
    "input": InputError,
    "full": QueueFullError,
    "unavailable": UnavailableError,
    "engine": EngineError,
}


def failure_of(error: Exception) -> Failure:
    """An exception as a record; one that is not of `FAILURES` is an EngineError."""
    kind = next((kind for kind, type_ in FAILURES.items() if isinstance(error, type_)), "engine")
    known = isinstance(error, FAILURES[kind])
    return Failure(kind, str(error) if known else f"{type(error).__name__}: {error}")


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of sampling parameters that are not as by default."""
    default = SamplingParams()
    return {name: value for name, value in vars(params).items() if value != getattr(default, name)}
