"""Checks of a caller's arguments by type and range. Each error names the argument, the value found and the values allowed."""

import operator
from collections.abc import Iterable, Mapping
from numbers import Real

from ..errors import DecoderError, RequestError

Refusal = type[DecoderError]


def shown(value: object) -> str:
    """A value for an error message: at most 60 characters, with its type unless it is a plain number or text."""
    try:
        text = repr(value)
    except Exception:  # a failing __repr__; an int of thousands of digits
        return f"an object of type {type(value).__name__}"
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if isinstance(value, str | int | float | None) else f"{text} ({type(value).__name__})"


def as_whole(value: object) -> int | None:
    """A whole number as an int, numpy's and torch's included; None for anything else, bool included."""
    if isinstance(value, bool) or "bool" in type(value).__name__:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # a tensor of several elements, a type with an __index__ that fails
        return None


def whole(name: str, value: object, low: int, high: int | None = None, why: str = "", error: Refusal = RequestError) -> int:
    """The value as an int. high: None for no upper limit; why: the source of `high`, for the message.

    Raises:
        error: not a whole number of low..high.
    """
    number = as_whole(value)
    if number is None or number < low or (high is not None and number > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise error(f"{name} is {shown(value)}", expected=f"a whole number, {allowed}{why}")
    return number


def number(name: str, value: object, expected: str) -> float:
    """The value as a float. expected: for the message.

    Raises:
        RequestError: not a finite real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(float(value)) < float("inf"):
        raise RequestError(f"{name} is {shown(value)}", expected=expected)
    return float(value)


def switch(name: str, value: object, error: Refusal = RequestError) -> bool:
    """The value as a bool. Raises `error` for anything but a bool, numpy's included."""
    if not isinstance(value, bool) and type(value).__name__ != "bool":  # numpy's
        raise error(f"{name} is {shown(value)}", expected="True or False")
    return bool(value)


def elements(name: str, value: object, expected: str) -> list[object]:
    """The elements of any iterable but a text or a mapping. Raises RequestError for anything else."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            return list(value)
        except TypeError:  # a tensor without dimensions
            pass
    raise RequestError(f"{name} is {shown(value)}", expected=expected)


def token_ids(name: str, value: object, limit: int) -> list[int]:
    """The value as a list of token ids. Raises RequestError unless all are whole numbers of 0..limit - 1."""
    expected = f"a list of token ids, whole numbers from 0 to {limit - 1}"
    found = []
    for item in elements(name, value, expected):
        token = as_whole(item)
        if token is None or not 0 <= token < limit:
            wrong = f"token id {shown(token)}" if token is not None else shown(item)
            raise RequestError(f"{wrong} in {name}", expected=expected)
        found.append(token)
    return found


def texts(name: str, value: object) -> tuple[str, ...]:
    """The value as strings: one string is a tuple of one, None an empty tuple. Raises RequestError for an empty string or
    anything but a string."""
    found = [] if value is None else [value] if isinstance(value, str) else elements(name, value, "a string or a list of strings")
    for item in found:
        if not isinstance(item, str) or not item:
            raise RequestError(f"{shown(item)} in {name}", expected="strings of at least one character")
    return tuple(str(item) for item in found)
