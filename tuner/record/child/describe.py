"""Functions, arguments and constants as JSON."""

import math
import sys
from typing import Any

MOST_TEXT = 200  # characters of a value that JSON has no kind for


def function(jitted: Any) -> dict[str, object]:
    """Where a jitted function is defined. line: of its first decorator."""
    inner = jitted.fn
    while not hasattr(inner, "__code__"):
        inner = inner.fn
    return {"function": inner.__qualname__, "module": inner.__module__, "file": inner.__code__.co_filename,
            "line": inner.__code__.co_firstlineno}


def layers(jitted: Any) -> dict[str, object]:
    """How a module's variable of the function's name leads to it. tuned, heuristics: names that an autotuner's configs and
    heuristics set; reached: whether that variable is the function, or it under nothing but these two."""
    found: Any = getattr(sys.modules.get(jitted.fn.__module__), jitted.fn.__name__, None)
    tuned: list[str] = []
    heuristics: list[str] = []
    while type(found).__name__ in ("Autotuner", "Heuristics"):
        if type(found).__name__ == "Autotuner":
            tuned += [name for config in found.configs for name in config.kwargs if name not in tuned]
        else:
            heuristics += list(found.values)
        found = found.fn
    return {"tuned": tuned, "heuristics": heuristics, "reached": found is jitted}


def argument(value: Any) -> object:
    """A tensor's dtype, shape and strides; a number, bool or None as it is; a tuple as a list."""
    if _plain(value):
        return value
    if isinstance(value, (tuple, list)):
        return [argument(inner) for inner in value]
    if hasattr(value, "block_shape") and hasattr(value, "base"):  # a tensor descriptor of the host
        return {"descriptor": argument(value.base), "shape": [int(n) for n in value.shape],
                "strides": [int(n) for n in value.strides], "block_shape": [int(n) for n in value.block_shape]}
    if hasattr(value, "data_ptr"):
        tensor: dict[str, object] = {"dtype": str(getattr(value, "dtype", "")).removeprefix("torch.")}
        if hasattr(value, "shape") and hasattr(value, "stride"):
            tensor.update(shape=[int(n) for n in value.shape], strides=[int(n) for n in value.stride()])
        return tensor
    return constant(value)


def constant(value: object) -> object:
    """The value of a tl.constexpr argument."""
    inner = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if _plain(inner):
        return inner
    if isinstance(inner, (tuple, list)):
        return [constant(one) for one in inner]
    if type(inner).__name__ == "dtype":
        return {"dtype": str(inner)}
    if hasattr(inner, "fn") and hasattr(inner, "arg_names"):
        return {"function": function(inner)}
    return {"value": repr(inner)[:MOST_TEXT], "type": type(inner).__name__}


def _plain(value: object) -> bool:
    """Whether JSON has it."""
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
