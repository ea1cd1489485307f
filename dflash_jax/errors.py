"""The one exception type that users are meant to read."""


class InputError(ValueError):
    """Bad input from outside: a path, a checkpoint, an option, a prompt.

    The message names the bad value and what would be right. Command lines print it as one line and exit with code 2.
    """
