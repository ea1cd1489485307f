"""Exceptions whose messages are written for users."""


class InputError(ValueError):
    """Bad input from outside: a path, a checkpoint, an option, a prompt.

    The message names the bad value and what would be right. Command lines print it as one line and exit with code 2.
    A second argument has what the message counts, and is no part of it.
    """

    def __str__(self) -> str:
        """The message."""
        return str(self.args[0]) if self.args else ""


class EngineError(RuntimeError):
    """A request could not be completed: the device failed, or logits are not finite.

    Command lines print the message as one line and exit with code 1.
    """


class UnavailableError(EngineError):
    """The engine accepts no requests: it has failed before, or was stopped."""


class QueueFullError(RuntimeError):
    """The queue of waiting requests is full."""
