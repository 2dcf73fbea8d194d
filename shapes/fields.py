"""The typed reader of all files: TOML and JSON into frozen dataclasses. Every error names the file and the field.

Example:

    @dataclass(frozen=True)
    class Paired:
        ratio: Positive                          # a float above 0; the file may have an int
        interval: tuple[float, float]
        pairs: Count                             # an int, 0 or more
        basis: Literal["paired", "separate"]
        note: str | None = None                  # may be missing or null; a field with a default may be missing

    fields = read_fields(path, ReportError)      # or parse_fields(data, "JSON", where, ReportError)
    schema = fields.get("schema", str)           # one field, typed
    paired = fields.inner("paired").read(Paired)   # a whole dataclass, by its annotations
    many = [inner.read(Paired) for inner in fields.items("rows")]
    fields.done()                                # refuses fields that weren't read; `read` does so itself

Annotations may be str, bool, int, float, `object` (any JSON value), Literal, X | None, tuple[X, ...], tuple[X, Y], Mapping[str,
X], dataclasses, Annotated[X, Rule(expected, holds)] (such as `Count`, `Positive`, `Finite`, `Name` and `Digest`), and
Annotated[X, From(function of the table)]. `dataclasses.asdict` is the inverse.

A file is refused before any field is read if it is larger than MOST_BYTES, nested deeper than DEEPEST levels, has a name twice in
one object, a number that isn't finite, or a lone surrogate.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from .errors import UserError

MOST_BYTES = {"JSON": 1 << 26, "TOML": 1 << 20}  # a report of the widest space has about 30 MB, the project's TOML files 4 kB
DEEPEST = 32  # the project's files have at most 8 levels
LARGEST = 2.0**1023  # larger numbers may have no float
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")  # of a model, SKU, recipe or kernel: a legal file name on every system

Table = dict[str, Any]  # a JSON object or TOML table
T = TypeVar("T")
D = TypeVar("D")
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Rule:
    """In Annotated: a condition on a field's value. expected: the condition in words."""

    expected: str
    holds: Callable[[Any], bool]  # of a value of the annotated type


@dataclass(frozen=True)
class From:
    """In Annotated: the function that makes the value from its table, such as `shape_from_dict`."""

    make: Callable[[Mapping[str, object], str, type[UserError]], object]


Count = Annotated[int, Rule("a whole number, 0 or more", lambda n: 0 <= n < 2**53)]
PositiveInt = Annotated[int, Rule("a positive whole number", lambda n: 0 < n < 2**53)]
Positive = Annotated[float, Rule("a positive number", lambda x: 0 < x < 2**53)]
Finite = Annotated[float, Rule("a finite number", math.isfinite)]
Name = Annotated[str, Rule("a name: letters, digits, '_', '.', '+' and '-', not a path", lambda text: bool(NAME.fullmatch(text)))]
Digest = Annotated[str, Rule("a digest in hexadecimal", lambda text: bool(re.fullmatch(r"[0-9a-f]{8,64}", text)))]


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', or an empty string if no known word is close."""
    close = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_name(text: str, what: str, error: type[UserError]) -> str:
    """`text`, if it is a name; else raises `error`. what: the name's meaning, such as `model`. For every name in a path."""
    if not NAME.fullmatch(text):
        raise error(f"{what} {shown(text)}", expected="a name: letters, digits, '_', '.', '+' and '-', not a path")
    return text


def shown(value: object) -> str:
    """A value as shown in errors, shortened."""
    text = repr(value[:100] if isinstance(value, (str, list, tuple)) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_fields(path: Path, error: type[UserError]) -> "Fields":
    """The table in a .toml or .json file. Raises `error` if it is unreadable, invalid, or not a table."""
    return Fields(read_table(path, error), str(path), error)


def parse_fields(data: bytes, kind: str, where: str, error: type[UserError]) -> "Fields":
    """As `read_fields`, for bytes. kind: TOML or JSON. where: the file's name in errors."""
    return Fields(parse_table(data, kind, where, error), where, error)


def read_table(path: Path, error: type[UserError]) -> Table:
    """As `read_fields`: the table itself."""
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    return parse_table(read_bytes(path, kind, error), kind, str(path), error)


def read_bytes(path: Path, kind: str, error: type[UserError]) -> bytes:
    """A file's first MOST_BYTES + 1 bytes: `parse_table` refuses larger files. Raises `error` if it is unreadable."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES[kind] + 1)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise error(f"{path}: {reason}", expected=f"a readable {kind} file") from None


def parse_table(data: bytes, kind: str, where: str, error: type[UserError]) -> Table:
    """As `parse_fields`: the table itself."""
    if len(data) > MOST_BYTES[kind]:
        raise error(f"{where}: larger than {MOST_BYTES[kind] >> 20} MiB", expected=f"a {kind} table")
    try:
        text = data.decode("utf-8")
        table = tomllib.loads(text.replace("\r\n", "\n")) if kind == "TOML" else _parse_json(text)
        _require_plain(table)
    except RecursionError:
        raise error(f"{where}: nested too deeply", expected=f"a {kind} table") from None
    except ValueError as e:  # tomllib.TOMLDecodeError, json.JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise error(f"{where}: not valid {kind}: {e}", expected=f"a {kind} table") from None
    if not isinstance(table, dict):
        raise error(f"{where}: holds a {type(table).__name__}", expected=f"a {kind} table")
    return table


def no_constant(name: str) -> None:
    """For `json.loads`, which accepts NaN and Infinity. Raises ValueError."""
    raise ValueError(f"{name} isn't JSON")


def _parse_json(text: str) -> object:
    return json.loads(text, parse_constant=no_constant, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(n for n in names if names.count(n) > 1))} is twice in one object")
    return table


def _require_plain(table: object) -> None:
    """Raises ValueError for a table that is nested too deeply, or has a number that isn't finite or a lone surrogate."""
    waiting = [(table, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(inner, (dict, list)):
                waiting.append((inner, depth + 1))
            elif isinstance(inner, str):
                if not inner.isascii() and any("\ud800" <= c <= "\udfff" for c in inner):
                    raise ValueError("text with half of a surrogate pair")
            elif isinstance(inner, (int, float)) and not -LARGEST < inner < LARGEST:
                raise ValueError("a number that is infinite, NaN or too large")


class Fields:
    """The fields of one table, each by name and type."""

    def __init__(self, table: Mapping[str, object], where: str, error: type[UserError]) -> None:
        """where: the file and the place in it, for errors. error: the exception that a wrong field raises."""
        self.table, self.where, self.error = table, where, error
        self.known: set[str] = set()

    def fail(self, name: str, problem: str, expected: str = "", action: str = "") -> UserError:
        """The error of one field, for the caller to raise."""
        return self.error(f"{self.where}: {name}: {problem}", expected=expected, action=action)

    @overload
    def get(self, name: str, kind: type[T]) -> T: ...

    @overload
    def get(self, name: str, kind: type[T], default: D) -> T | D: ...

    def get(self, name: str, kind: type[T], default: object = ...) -> object:
        """The field as `kind`. An int may serve as a float, a bool never as an int. default: for a missing field or null. Raises
        `error`."""
        self.known.add(name)
        if self.table.get(name) is None and default is not ...:
            return default
        if name not in self.table:
            raise self.fail(name, "missing", expected=f"a {kind.__name__}")
        return SCALARS[kind](self, name, self.table[name])

    @overload
    def positive(self, name: str, kind: type[N]) -> N: ...

    @overload
    def positive(self, name: str, kind: type[N], default: D) -> N | D: ...

    def positive(self, name: str, kind: type[N], default: object = ...) -> object:
        """As `get`, for a number above 0."""
        if self.table.get(name) is None and default is not ...:
            return self.get(name, kind, default)
        value = self.get(name, kind)
        if not 0 < value < 2**53:
            raise self.fail(name, f"is {value}", expected="a positive number")
        return value

    def inner(self, name: str) -> "Fields":
        """The table in a field."""
        return Fields(self.get(name, dict), f"{self.where}: {name}", self.error)

    def items(self, name: str) -> list["Fields"]:
        """The tables in a field that is a list."""
        return [_table(self, f"{name}[{i}]", value) for i, value in enumerate(self.get(name, list))]

    def each(self, name: str) -> dict[str, "Fields"]:
        """The tables in a field that is a table of tables, by name."""
        inner = self.inner(name)
        return {key: inner.inner(key) for key in inner.table}

    def read(self, kind: type[T], **given: object) -> T:
        """A dataclass from exactly its fields, by its annotations. given: fields that aren't in the table. Raises `error`."""
        found = dict(given)
        plan = _plan(kind)  # type: ignore[arg-type]  # mypy holds a dataclass's type for unhashable
        for name, part in plan.items():
            if name in given:
                continue
            self.known.add(name)
            if name in self.table:
                found[name] = part.reader(self, name, self.table[name])
            elif part.needed:
                raise self.fail(name, "missing", expected=f"each of {', '.join(n for n in plan if n not in given)}")
            elif part.optional:
                found[name] = None
        self.done()
        return kind(**found)

    def done(self, action: str = "") -> None:
        """Raises `error` for a field that wasn't read."""
        for name in self.table:
            if name not in self.known:
                raise self.fail(name[:100], f"unknown field{nearest(name, self.known)}",
                                expected=f"one of {', '.join(sorted(self.known))}", action=action)


Reader = Callable[[Fields, str, object], object]  # (table, field's name, raw value) → value


@dataclass(frozen=True)
class _Part:
    """How one field of a dataclass is read. optional: has no default, and is None if missing."""

    reader: Reader
    needed: bool
    optional: bool


@cache
def _plan(kind: type) -> dict[str, _Part]:
    """The parts of a dataclass by field. Cached: resolving annotations takes longer than reading."""
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind, include_extras=True)
    plan = {}
    for field in dataclasses.fields(kind):
        default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        optional = type(None) in get_args(hints[field.name]) and not default
        plan[field.name] = _Part(_reader(hints[field.name]), not (default or optional), optional)
    return plan


def _reader(hint: Any) -> Reader:
    """The reader of one annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        made = [a for a in arguments[1:] if isinstance(a, From)]
        inner = _made(made[0]) if made else _reader(arguments[0])
        return _ruled(inner, [a for a in arguments[1:] if isinstance(a, Rule)])
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, UnionType):
        [kind] = [a for a in arguments if a is not type(None)]
        return _optional(_reader(kind))
    if origin is tuple:
        return _list(_reader(arguments[0])) if arguments[1:] == (...,) else _fixed([_reader(a) for a in arguments])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(arguments[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda fields, name, value: _table(fields, name, value).read(hint)
    return SCALARS[hint]


def _wrong(fields: Fields, name: str, value: object, kind: type) -> UserError:
    return fields.fail(name, f"{shown(value)} is a {type(value).__name__}", expected=f"a {kind.__name__}")


def _of(kind: type[T]) -> Callable[[Fields, str, object], T]:
    """The reader of a plain type."""
    def read(fields: Fields, name: str, value: object) -> T:
        if not isinstance(value, kind):
            raise _wrong(fields, name, value, kind)
        return value
    return read


def _whole(fields: Fields, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(fields, name, value, int)
    if abs(value) >= 2**64:
        raise fields.fail(name, "too large", expected="a whole number of at most 64 bits")
    return value


def _number(fields: Fields, name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or (isinstance(value, int) and abs(value) >= 2**53):
        raise _wrong(fields, name, value, float)
    if not math.isfinite(value):
        raise fields.fail(name, f"is {value}", expected="a finite number")
    return float(value)


_list_of, _table_of = _of(list), _of(dict)
SCALARS: Mapping[object, Reader] = {str: _of(str), bool: _of(bool), int: _whole, float: _number, list: _list_of, dict: _table_of,
                                    object: _of(object)}


def _ruled(inner: Reader, rules: list[Rule]) -> Reader:
    def read(fields: Fields, name: str, value: object) -> object:
        found = inner(fields, name, value)
        for rule in rules:
            if not rule.holds(found):
                raise fields.fail(name, f"is {shown(value)}", expected=rule.expected)
        return found
    return read


def _made(by: From) -> Reader:
    def read(fields: Fields, name: str, value: object) -> object:
        table = _table(fields, name, value)
        return by.make(table.table, table.where, table.error)
    return read


def _literal(choices: tuple[object, ...]) -> Reader:
    def read(fields: Fields, name: str, value: object) -> object:
        if not any(type(value) is type(c) and value == c for c in choices):
            raise fields.fail(name, f"is {shown(value)}", expected=f"one of {', '.join(map(str, choices))}")
        return value
    return read


def _optional(inner: Reader) -> Reader:
    return lambda fields, name, value: None if value is None else inner(fields, name, value)


def _list(inner: Reader) -> Reader:
    def read(fields: Fields, name: str, value: object) -> tuple[object, ...]:
        listed = _list_of(fields, name, value)
        return tuple(inner(fields, f"{name}[{i}]", v) for i, v in enumerate(listed))
    return read


def _fixed(inner: list[Reader]) -> Reader:
    def read(fields: Fields, name: str, value: object) -> tuple[object, ...]:
        listed = _list_of(fields, name, value)
        if len(listed) != len(inner):
            raise fields.fail(name, f"has {len(listed)} values", expected=f"{len(inner)}")
        return tuple(reader(fields, f"{name}[{i}]", v) for i, (reader, v) in enumerate(zip(inner, listed)))
    return read


def _mapping(inner: Reader) -> Reader:
    def read(fields: Fields, name: str, value: object) -> dict[str, object]:
        table = _table(fields, name, value)
        return {key: inner(table, key, v) for key, v in table.table.items()}
    return read


def _table(fields: Fields, name: str, value: object) -> Fields:
    return Fields(_table_of(fields, name, value), f"{fields.where}: {name}", fields.error)
