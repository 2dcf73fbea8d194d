"""Sizes and knobs of one's own: values that can't change, tell 1 from True, and survive JSON."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.schedules.errors import ScheduleError
from tune_kernels.schedules.schedule import OwnSchedule, knobs_of, schedule_id, schedule_of, schedule_to_dict
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.model import RowShape, dims_of, shape_from_dict, shape_to_dict
from tune_kernels.shapes.own import LARGEST_SIZE, Frozen, OwnShape

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
VALUES = (st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
          | st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=40))
KNOBS = st.dictionaries(WORDS, VALUES, max_size=6)
DIMS = st.dictionaries(WORDS, st.integers(1, LARGEST_SIZE), max_size=6)


@given(KNOBS)
def test_a_schedule_survives_json(knobs: dict[str, int | float | bool | str | None]) -> None:
    schedule = OwnSchedule(Frozen(knobs))
    again = schedule_of(json.loads(json.dumps(schedule_to_dict(schedule))), "test")
    assert again == schedule and hash(again) == hash(schedule) and schedule_id(again) == schedule_id(schedule)
    assert {name: (type(v), v) for name, v in knobs_of(again).items()} == {name: (type(v), v) for name, v in knobs.items()}


@given(DIMS)
def test_a_shape_survives_json_and_is_no_other_kind(dims: dict[str, int]) -> None:
    shape = OwnShape(Frozen(dims))
    again = shape_from_dict(json.loads(json.dumps(shape_to_dict(shape))), "test")
    assert again == shape and hash(again) == hash(shape) and dict(dims_of(again)) == dims


def test_a_shape_of_one_size_named_as_a_built_in_one() -> None:
    assert shape_from_dict({"dims": {"N": 4}}, "test") == OwnShape(Frozen({"N": 4}))
    assert shape_from_dict({"N": 4}, "test") == RowShape(4)


@given(KNOBS)
def test_copies_and_pickles_are_equal(knobs: dict[str, int | float | bool | str | None]) -> None:
    values = Frozen(knobs)
    assert pickle.loads(pickle.dumps(values)) == copy.deepcopy(values) == values
    assert type(copy.deepcopy(values)) is Frozen


def test_one_true_and_one_point_nought_are_three_schedules() -> None:
    schedules = {OwnSchedule(Frozen({"A": value})) for value in (1, True, 1.0)}
    assert len(schedules) == 3 and len({schedule_id(s) for s in schedules}) == 3


def test_order_does_not_count() -> None:
    assert Frozen({"a": 1, "b": 2}) == Frozen({"b": 2, "a": 1})
    assert hash(Frozen({"a": 1, "b": 2})) == hash(Frozen({"b": 2, "a": 1}))


def test_nothing_changes_it() -> None:
    values = Frozen({"a": 1})
    for change in (lambda: values.__setitem__("a", 2), lambda: values.update(a=2), lambda: values.pop("a"),
                   lambda: values.setdefault("b", 1), values.clear, values.popitem, lambda: values.__delitem__("a"),
                   lambda: values.__ior__({"a": 2})):
        with pytest.raises(TypeError):
            change()
    assert values == Frozen({"a": 1})


@pytest.mark.parametrize("dims", [{"N": 0}, {"N": -1}, {"N": True}, {"N": 1.0}, {"N": "4"}, {"N": LARGEST_SIZE + 1}, {"../N": 4},
                                  {"N M": 4}, {"": 4}, 5, None, ["N"]])
def test_wrong_sizes_are_named(dims: object) -> None:
    with pytest.raises(ShapeError, match="test"):
        shape_from_dict({"dims": dims}, "test")


@pytest.mark.parametrize("knobs", [{"A": float("nan")}, {"A": float("inf")}, {"A": 2**64}, {"A": [1]}, {"A": {}}, {"../A": 1},
                                   {"A": "x" * 1000}, {"A": "\x1b[31m"}, 5, None])
def test_wrong_knobs_are_named(knobs: object) -> None:
    with pytest.raises(ScheduleError, match="test"):
        schedule_of({"knobs": knobs}, "test")
