"""The exception types that users are meant to read."""


class InputError(ValueError):
    """Bad input from outside: a path, a checkpoint, an option, a prompt.

    The message names the bad value and what would be right. Command lines print it as one line and exit with code 2.
    """


class EngineError(RuntimeError):
    """A request came to no end: the device failed, or what the model computed is no number. Command lines print it as
    one line and exit with code 1."""


class UnavailableError(EngineError):
    """The engine takes no requests: it has failed before, or was stopped."""
