"""The typed reader: each fault of a file is refused with the file's and the field's name, and nothing else is raised."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.fields import MOST_BYTES, Count, Fields, Name, Positive, parse_fields, parse_table, read_fields


@dataclass(frozen=True)
class Part:
    low: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    name: Name
    count: Count
    ratio: Positive
    on: bool
    kind: Literal["a", "b"]
    pair: tuple[int, int]
    part: Part
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part]
    anything: object
    note: str | None


RIGHT = {"name": "qwen2.5-7b", "count": 3, "ratio": 2, "on": True, "kind": "a", "pair": [1, 2], "part": {"low": 0.5},
         "parts": [{"low": 1, "names": ["x"]}], "by_name": {"k": {"low": 2.5}}, "anything": [1, {"a": None}]}


def parsed(text: str | bytes, kind: str = "JSON") -> Fields:
    return parse_fields(text if isinstance(text, bytes) else text.encode(), kind, "f", UserError)


def test_a_dataclass_is_read_by_its_annotations() -> None:
    found = parsed(json.dumps(RIGHT)).read(Whole)
    assert found == Whole("qwen2.5-7b", 3, 2.0, True, "a", (1, 2), Part(0.5), (Part(1.0, ("x",)),), {"k": Part(2.5)},
                          [1, {"a": None}], None)
    assert type(found.ratio) is float and parsed(json.dumps(asdict(found))).read(Whole) == found


@pytest.mark.parametrize(("name", "value", "said"), [
    ("name", "../up", "f: name: is '../up'"), ("name", "", "f: name"), ("name", "a/b", "f: name"), ("name", "a\n", "f: name"),
    ("count", -1, "f: count: is -1"), ("count", True, "f: count: True is a bool"), ("count", 1.0, "f: count: 1.0 is a float"),
    ("count", 10**400, "not valid JSON: a number"), ("ratio", 0, "f: ratio"), ("ratio", 10**30, "f: ratio"), ("on", 1, "f: on"),
    ("kind", "c", "f: kind: is 'c'\nexpected: one of a, b"), ("pair", [1], "f: pair: has 1 values"), ("pair", "12", "f: pair"),
    ("pair", [1, "2"], r"f: pair\[1\]: '2' is a str"), ("part", [], "f: part"), ("part", {}, "f: part: low: missing"),
    ("part", {"low": 1, "high": 2}, "f: part: high: unknown field"), ("parts", [{"low": 1}, 2], r"f: parts\[1\]: 2 is a int"),
    ("by_name", {"k": 3}, "f: by_name: k: 3 is a int"), ("note", 5, "f: note"), ("nmae", 1, "f: nmae: unknown field.*'name'"),
])
def test_a_wrong_field_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parsed(json.dumps({**RIGHT, name: value})).read(Whole)


@pytest.mark.parametrize("name", [name for name in RIGHT])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"f: {name}: missing"):
        parsed(json.dumps({k: v for k, v in RIGHT.items() if k != name})).read(Whole)


@pytest.mark.parametrize(("text", "said"), [
    ('{"a": 1, "b": {"c": 2, "c": 3}}', "'c' is twice"), ('{"a": 1e400}', "infinite"), ('{"a": NaN}', "NaN isn't JSON"),
    ('{"a": "\\ud800"}', "surrogate"), ('{"\\udc00": 1}', "surrogate"), ('{"a": 1' + "0" * 400 + "}", "too large"),
    ('{"a": 1' + "0" * 5000 + "}", "not valid JSON"), ('{"a": ' + "[" * 50 + "]" * 50 + "}", "deeper than 32"),
    ('{"a": ' * 100_000, "nested too deeply|not valid"), ("[]", "holds a list"), (b"\xff", "not valid JSON"), ("", "not valid"),
])
def test_a_json_file_that_no_reader_expects_is_refused(text: str | bytes, said: str) -> None:
    """F16: a name that stands twice; F21: a number of 400 digits, half of a surrogate pair."""
    with pytest.raises(UserError, match=said):
        parsed(text)


@pytest.mark.parametrize(("text", "said"), [
    ("a = inf", "infinite"), ("a = 0x" + "f" * 6000, "too large"), ("a = 1\na = 2", "not valid TOML"),
    ("a = " + "[" * 50 + "]" * 50, "deeper than 32"), ("x" * (MOST_BYTES["TOML"] + 1), "larger than 1 MiB"),
])
def test_a_toml_file_that_no_reader_expects_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parsed(text, "TOML")


def test_a_file_is_read_no_further_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_BYTES, "JSON", 1000)
    with pytest.raises(UserError, match="larger than"):
        read_fields(Path("/dev/zero"), UserError)
    with pytest.raises(UserError, match="No such file"):
        read_fields(tmp_path / "none.json", UserError)
    with pytest.raises(UserError, match="null byte"):
        read_fields(Path("a\0b.json"), UserError)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.sampled_from(["a", "../x"])
NAMES = st.sampled_from([*RIGHT, "low", "names"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow, and no fault
@given(st.dictionaries(st.sampled_from([*RIGHT, "note", "other"]), JSON))
def test_any_table_is_read_or_refused(changes: dict[str, object]) -> None:
    """Nothing but UserError is raised, and its text can be printed."""
    try:
        table = parse_table(json.dumps({**RIGHT, **changes}).encode(), "JSON", "f", UserError)
        Fields(table, "f", UserError).read(Whole)
    except UserError as e:
        str(e).encode()


def test_an_error_spells_out_what_a_terminal_would_obey() -> None:
    """Names and values come from files: escape codes, other controls and text that turns its direction are shown, not sent."""
    error = UserError("f: \x1b[31mred\x07\u202e\udc80", expected="a\x9bb", action="line 1\nline 2")
    assert str(error) == "f: \\x1b[31mred\\x07\\u202e\\udc80\nexpected: a\\x9bb\nto do: line 1\nline 2"
    assert len(str(UserError("x" * 10**6))) < 10_000
