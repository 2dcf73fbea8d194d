"""Reading TOML and JSON files into frozen dataclasses: every wrong field is named, and so is the file."""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import UserError


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def read_table(path: Path, error: type[UserError]) -> dict[str, Any]:
    """The table in a .toml or .json file. Raises `error` where it can't be read, parsed, or isn't a table."""
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        data = path.read_bytes()
    except OSError as e:
        raise error(f"{path}: {e.strerror or e}", expected=f"a readable {kind} file") from None
    return parse_table(data, kind, str(path), error)


def no_constant(name: str) -> None:
    """For `json.loads`: NaN and Infinity, which Python reads and JSON doesn't have. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


def parse_table(data: bytes, kind: str, where: str, error: type[UserError]) -> dict[str, Any]:
    """The table in the bytes of a file, TOML or JSON. Raises `error` where they can't be parsed or aren't a table."""
    try:
        text = data.decode("utf-8")
        table = tomllib.loads(text.replace("\r\n", "\n")) if kind == "TOML" else json.loads(text, parse_constant=no_constant)
    except RecursionError:
        raise error(f"{where}: nested too deeply", expected=f"a {kind} table") from None
    except ValueError as e:  # tomllib.TOMLDecodeError, json.JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{where}: not valid {kind}: {e}", expected=f"a {kind} table") from None
    if not isinstance(table, dict):
        raise error(f"{where}: holds a {type(table).__name__}", expected=f"a {kind} table")
    return table


class Fields:
    """Takes typed fields out of a table, naming file and field in every error."""

    def __init__(self, table: Mapping[str, Any], where: str, error: type[UserError]) -> None:
        self.table, self.where, self.error = table, where, error
        self.taken: set[str] = set()

    def fail(self, name: str, problem: str, expected: str = "", action: str = "") -> UserError:
        return self.error(f"{self.where}: {name}: {problem}", expected=expected, action=action)

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        """The field as `kind`; an int serves where a float is wanted, a bool never serves as an int."""
        self.taken.add(name)
        if name not in self.table or (self.table[name] is None and default is not ...):
            if default is ...:
                raise self.fail(name, "missing", expected=f"a {kind.__name__}")
            return default
        value = self.table[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            value = float(value)
        if not isinstance(value, kind) or (kind in (int, float) and isinstance(value, bool)):
            raise self.fail(name, f"{value!r} is a {type(value).__name__}", expected=f"a {kind.__name__}")
        return value

    def positive(self, name: str, kind: type = int, default: Any = ...) -> Any:
        value = self.take(name, kind, default)
        if value is not default and not 0 < value < 2**53:
            raise self.fail(name, f"is {value}", expected="a positive number")
        return value

    def done(self, action: str = "") -> None:
        """Raises on the first field that nobody took."""
        for name in self.table:
            if name not in self.taken:
                raise self.fail(name, f"unknown field{nearest(name, self.taken)}",
                                expected=f"one of {', '.join(sorted(self.taken))}", action=action)
