"""The recorded launches as kernel files that `tune-kernels --offline --kernel FILE` takes: one file per module of the program.

Launches of one function whose types and compiled-in values are alike are one `Kernel`, with a shape per launch. What a file can't
say (a function inside a function, tuples, tensors without elements, values that have no text) is left out, with the reason.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .recording import Launch, RecordedKernel, Recording

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
USUAL = {"num_ctas": 1, "launch_pdl": False}  # not written
TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "int1": "int1", "fp8e4nv": "float8e4nv",
         "fp8e5": "float8e5", **{name: name for bits in (8, 16, 32, 64) for name in (f"int{bits}", f"uint{bits}")}}


class _LeftOut(Exception):
    """Why a launch isn't in a kernel file."""


@dataclass
class _Described:
    """One Kernel(...). arguments, knobs: Python by name; shapes: each once, in the order of the launches."""

    function: str
    arguments: dict[str, str]
    knobs: dict[str, str] | None
    shapes: list[dict[str, int]] = field(default_factory=list)
    grid: int = 0  # number of dimensions that are blocks


@dataclass(frozen=True)
class KernelFiles:
    """paths: written; left_out: launches that are in none, as module:function and the reason."""

    texts: dict[str, str]
    left_out: dict[str, str]


def kernel_files(recording: Recording) -> KernelFiles:
    """The text of each file, by its name."""
    kernels = {kernel.hash: kernel for kernel in recording.kernels}
    modules: dict[str, list[_Described]] = {}
    files: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for launch in recording.launches:
        kernel = kernels.get(launch.kernel)
        if kernel is None or (launch.trial and kernel.tuned):
            continue
        try:
            described, shape = _described(kernel, launch)
        except _LeftOut as e:
            left_out.setdefault(kernel.source, str(e))
            continue
        files[kernel.module] = kernel.file
        group = modules.setdefault(kernel.module, [])
        same = next((one for one in group if (one.function, one.arguments, one.knobs, one.grid)
                     == (described.function, described.arguments, described.knobs, described.grid)), None)
        if same is None:
            group.append(described)
            same = described
        if shape not in same.shapes:
            same.shapes.append(shape)
    return KernelFiles({_file_name(module, files[module]): _text(module, files[module], group)
                        for module, group in sorted(modules.items())}, left_out)


def _described(kernel: RecordedKernel, launch: Launch) -> tuple[_Described, dict[str, int]]:
    """The launch without its sizes, and its sizes. Raises _LeftOut."""
    if not kernel.reached:
        raise _LeftOut("its module has no variable that leads to it")
    constants = {path[0]: value for path, value in kernel.constants if len(path) == 1}
    arguments: dict[str, str] = {}
    shape: dict[str, int] = {}
    knobs: dict[str, str] = {}
    for index, ((name, kind), value) in enumerate(zip(kernel.signature, launch.arguments)):
        if name in kernel.tuned or name in kernel.heuristics:
            continue
        if kind == "constexpr":
            text = _literal(constants.get(index))
            compiled_in = type(constants.get(index)) is int and value not in (None, 1)
            (knobs if compiled_in else arguments)[name] = text
        elif isinstance(value, dict):
            arguments[name] = _tensor(kernel, index, value, shape)
        elif type(value) is int and kind in ("i32", "i64", "u64") and value >= 1:
            shape[name] = value
            arguments[name] = f'Scalar("{kind}", "{name}")'
        elif type(value) in (int, float, bool):
            arguments[name] = repr(value)
        else:
            raise _LeftOut(f"{name} is {'a tuple' if isinstance(value, list) else type(value).__name__}")
    if kernel.tuned:  # its configs are the knobs, and the grid depends on them
        return _Described(kernel.function, arguments | knobs, None), shape
    knobs |= {name: repr(value) for name in OPTIONS if (value := kernel.options.get(name)) is not None
              and value != USUAL.get(name)}
    grid = 3 if launch.grid[2] > 1 else 2 if launch.grid[1] > 1 else 1
    if min(launch.grid) < 1:
        raise _LeftOut(f"its grid is {launch.grid}")
    shape |= {f"blocks_{axis}": size for axis, size in enumerate(launch.grid[:grid])}
    return _Described(kernel.function, arguments, knobs, grid=grid), shape


def _tensor(kernel: RecordedKernel, index: int, value: dict[str, object], shape: dict[str, int]) -> str:
    """A tensor or a tensor descriptor; its sizes go into the shape. Raises _LeftOut."""
    name, kind = kernel.signature[index]
    base = value.get("descriptor")
    of = base if isinstance(base, dict) else value
    sizes, element = of.get("shape"), re.match(r"\*k?(\w+)|tensordesc<(\w+)\[", kind)
    if not isinstance(sizes, list) or element is None:
        raise _LeftOut(f"{name} is a {kind}")
    if any(type(size) is not int or size < 1 for size in sizes):
        raise _LeftOut(f"{name} has no elements")
    dims = [f"{name}_{axis}" for axis in range(len(sizes))]
    shape |= dict(zip(dims, sizes))
    options = ["output=True"] if name in (kernel.outputs or ()) else []
    options += ["aligned=False"] if base is None and index not in kernel.divisible else []
    options += [f"block={tuple(_whole(value.get('block_shape')))}"] if isinstance(base, dict) else []
    return f"Tensor({', '.join([_quoted(element.group(1) or element.group(2)), *map(_quoted, dims), *options])})"


def _whole(value: object) -> Iterator[int]:
    yield from (size for size in value if type(size) is int) if isinstance(value, list) else ()


def _quoted(text: str) -> str:
    return f'"{text}"'


def _literal(value: object) -> str:
    """Python for a compiled-in value. Raises _LeftOut for a function and the like."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, dict) and value.get("dtype") in TYPES:
        return f"tl.{TYPES[str(value['dtype'])]}"
    raise _LeftOut(f"a compiled-in value is {str(value)[:100]}")


def _file_name(module: str, file: str) -> str:
    return re.sub(r"\W+", "_", Path(file).stem if module == "__main__" else module) + "_kernels.py"


def _text(module: str, file: str, group: list[_Described]) -> str:
    """The file."""
    name = Path(file).stem if module == "__main__" else module
    root = Path(file).parent
    for _ in name.split(".")[1:]:
        root = root.parent
    root = root.parent if Path(file).name == "__init__.py" else root
    lines = [f'"""Launches of {name}, as `tune-kernels record` saw them. Edit knobs and shapes at will."""', "",
             "import sys", "", "import triton.language as tl  # noqa: F401", "",
             "from tune_kernels import Kernel, Scalar, Tensor  # noqa: F401", "", f"sys.path.append({str(root)!r})",
             f"import {name} as recorded  # noqa: E402", ""]
    for number, one in enumerate(group):
        kernel = f"{one.function}_{number}"
        lines += ["", f"{kernel} = Kernel(", f"    recorded.{one.function}, name={_quoted(f'{name}.{kernel}'[-100:])},",
                  "    arguments={"]
        lines += [f"        {_quoted(argument)}: {text}," for argument, text in one.arguments.items()]
        lines += ["    },", "    shapes=["] + [f"        {shape!r}," for shape in one.shapes] + ["    ],"]
        if one.knobs is not None:
            knobs = ", ".join(f"{_quoted(knob)}: {text}" for knob, text in one.knobs.items())
            blocks = "".join(f'shape["blocks_{axis}"], ' for axis in range(one.grid))
            lines += [f"    knobs=[{{{knobs}}}],", f"    grid=lambda shape, knobs: ({blocks}),"]
        lines.append(")")
    return "\n".join(lines) + "\n"
