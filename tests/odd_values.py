"""Values that messages and libraries stumble over."""

import warnings

import numpy as np

from dflash_jax.errors import InputError

HUGE = 10**5000  # Python writes at most 4,300 digits.
SURROGATE = "\ud800"


class Unprintable:
    """A value whose repr raises."""

    def __repr__(self):
        raise RuntimeError("no repr")


ODD = [HUGE, -HUGE, [HUGE], {HUGE: HUGE}, SURROGATE, [SURROGATE], "a\0b", Unprintable(), [Unprintable()], np.int64]


def refusal(call) -> str | None:
    """The message with which a call is refused; None where it is not. Fails for a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            call()
        except InputError as e:
            message = str(e)
        else:
            return None
    assert "\n" not in message
    message.encode()
    return message
