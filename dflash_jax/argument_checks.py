"""Checks of arguments by their annotations: a wrong type or an unknown keyword is an InputError that names it."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from dflash_jax.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
# One of a type, and several of it, as messages name them.
FORMS = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    dict: ("a dict", "dicts"),
    list: ("a list", "lists"),
    Path: ("a path", "paths"),
    NoneType: ("None", "None"),
    Callable: ("a callable", "callables"),
}
# Types whose values `plain` leaves as they are; for speed.
PLAIN_TYPES = {NoneType, bool, int, float, str, tuple, list, dict}
# Where a message would have too many names.
REFERENCE = "docs/api.md and docs/vllm_and_sglang.md list them"
hints_of = cache(get_type_hints)


class ArgumentError(InputError):
    """A wrong value of an argument; the message is the argument's name and what is wrong with the value.

    Attributes:
        name: The argument.
        fault: The rest of the message.
    """

    def __init__(self, name: str, fault: str):
        super().__init__(f"{name} {fault}")
        self.name, self.fault = name, fault

    def __reduce__(self):
        return type(self), (self.name, self.fault)


def wrong(name: str, value: Any, right: str) -> ArgumentError:
    """The error of an argument's value; ``right`` says what it must be."""
    return ArgumentError(name, f"is {shown(value)}: it must be {right}")


@contextmanager
def caller_names(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, an `ArgumentError` names an argument as the caller gave it.

    Args:
        names: The caller's name by ours, for arguments that were given under another name.
    """
    try:
        yield
    except ArgumentError as e:
        if e.name not in names:
            raise
        raise ArgumentError(names[e.name], e.fault) from None


class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python writes no integer of more than 4,300 digits."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"an integer of {x.bit_length()} bits"


_repr = _Repr().repr


def shown(value: Any) -> str:
    """A value as a message shows it: its repr on one line, of at most 60 characters; its type where it has no repr."""
    try:
        return " ".join(_repr(value).split())[:60]
    except Exception:  # any that a __repr__ raises
        return f"a value of type {type(value).__name__[:40]}"


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays, and other numbers than int and float, as Python's; any other value as it is."""
    if type(value) in PLAIN_TYPES or isinstance(value, type):
        return value
    if (tolist := getattr(value, "tolist", None)) is not None:
        value = tolist()
    if isinstance(value, Real) and not isinstance(value, int | float):
        try:
            return int(value) if isinstance(value, Integral) else float(value)
        except OverflowError:
            return value
    return value


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold a string; a surrogate alone it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value has the type of an annotation. NumPy's numbers are numbers; True and False are not."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(has_type(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if annotation in (int, float):
        return isinstance(value, Integral if annotation is int else Real) and not isinstance(value, bool)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, origin) or isinstance(value, str | bytes | bytearray):
            return False
        # There may be as many token ids as the vocabulary has: their types first, at the speed of C.
        return set(map(type, value)) <= {arguments[0]} or all(has_type(each, arguments[0]) for each in value)
    return annotation is Any or isinstance(value, origin or annotation)


@cache
def _plain_types(annotation: Any) -> frozenset[type]:
    """Types whose values have the type of an annotation, whatever they are."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return frozenset(each for each in members if isinstance(each, type)) | ({int} if float in members else set())


def form_of(annotation: Any, many: int = 0) -> str:
    """An annotation in words; ``many`` is 1 for several values of it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        forms = list(dict.fromkeys(form_of(each, many) for each in arguments))
        return " or ".join(filter(None, (", ".join(forms[:-1]), forms[-1])))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (list, tuple, Sequence):
        return ("a list of ", "lists of ")[many] + form_of(arguments[0], 1)
    kind = origin or annotation
    return FORMS[kind][many] if kind in FORMS else kind.__name__


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raises InputError, which names the argument and the form expected, for a value of another type."""
    # The second test is slower, and these run for every request.
    if type(value) not in _plain_types(annotation) and not has_type(value, annotation):
        raise wrong(name, value, form_of(annotation))


def check_fields(values: Any) -> None:
    """Makes the values of a frozen dataclass's fields `plain`, and checks their types. Raises InputError."""
    for name, annotation in hints_of(type(values)).items():
        given = getattr(values, name)
        if (value := plain(given)) is not given:
            object.__setattr__(values, name, value)
        check_type(name, value, annotation)


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The names that are near to one that is not known, the nearest first, at most ``count``."""
    return get_close_matches(name[:64], list(known), n=count)


def suggestion(name: str, known: Iterable[str], count: int = 1, otherwise: str | None = None) -> str:
    """What an error says after a name that is not known.

    Args:
        name: The name.
        known: The names that there are.
        count: Most of them that are suggested.
        otherwise: What it says where no name is near; None: the list of all.
    """
    if near := nearest(name, known := list(known), count):
        return f"did you mean {' or '.join(near)}?"
    return f"known are {', '.join(known)}" if otherwise is None else otherwise


def unknown(callee: str, name: str, known: Iterable[str]) -> InputError:
    """The error of a keyword that ``callee`` does not have, with the nearest that it has."""
    known = list(known)
    hint = suggestion(name, known, otherwise=None if len(", ".join(known)) <= 200 else REFERENCE)
    return InputError(f"{callee} has no argument {name[:60]!r}: {hint}")


def _not_bound(name: str, signature: inspect.Signature, args: tuple, keywords: dict) -> InputError:
    """The error of a call of a method that lacks an argument, or has too many."""
    parameters = signature.parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        return InputError(f"{name}() has {len(args) - 1} arguments without a keyword: it takes {', '.join(names[1:])}")
    given = names[: len(args)]
    if twice := [each for each in given if each in keywords]:
        return InputError(f"{name}() has two values for {twice[0]}: give one of them")
    missing = [each.name for each in parameters if each.default is each.empty]
    missing = [each for each in missing if each not in (*given, *keywords)]
    return InputError(f"{name}() needs {', '.join(missing)}")


def checked(*apart: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that the types of its arguments are checked, and unknown keywords get a suggestion.

    NumPy's values reach the function as Python's.

    Args:
        apart: Arguments that the function checks itself.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        names = [name for name in signature.parameters if name != "self"]

        @wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            for name in keywords:
                if name not in names:
                    raise unknown(f"{function.__name__}()", name, names)
            hints = hints_of(function)
            try:
                bound = signature.bind(*args, **keywords)
            except TypeError:
                raise _not_bound(function.__name__, signature, args, keywords) from None
            for name, value in bound.arguments.items():
                if name in hints and name not in apart:
                    bound.arguments[name] = plain(value)
                    check_type(name, bound.arguments[name], hints[name])
            return function(*bound.args, **bound.kwargs)

        return call

    return decorated
