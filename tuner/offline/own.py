"""A user's kernels in a sweep. The user's code is imported and asked in workers alone: the sweep itself sees values.

A file that raises, hangs, prints, kills its process or changes global state does so in processes that serve no other file.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import MetaPathFinder

from ...kernels import toolchain
from ...kernels.arguments import KernelError
from ...kernels.bundle import kernel_digest
from ...kernels.loading import Source, kernels_in
from ...kernels.operation import Jitted
from ...schedules.schedule import OwnSchedule
from ...shapes.fields import nearest, shown
from ...shapes.own import OwnShape


@dataclass(frozen=True)
class OwnKernel:
    """A user's kernel as its file describes it. source: of this kernel alone; digest: of the jitted functions."""

    name: str
    source: Source
    digest: str
    shapes: tuple[OwnShape, ...]
    schedules: tuple[OwnSchedule, ...]

    @cached_property
    def knobs(self) -> Mapping[str, list[object]]:
        """The values of each knob, each once."""
        found: dict[str, dict[tuple[type, object], object]] = {}
        for schedule in self.schedules:
            for name, value in schedule.knobs.items():
                found.setdefault(name, {})[type(value), value] = value
        return {name: list(values.values()) for name, values in found.items()}

    def knob_problem(self, name: str, value: object) -> str | None:
        """Why a space can't have this knob with this value, or None."""
        if name not in self.knobs:
            return f"unknown knob {shown(name)}{nearest(name, self.knobs)}; expected one of {', '.join(self.knobs) or 'none'}"
        if not any(type(value) is type(known) and value == known for known in self.knobs[name]):
            return f"{name} is {shown(value)}; expected one of {', '.join(map(repr, self.knobs[name]))}"
        return None


def describe(source: Source) -> tuple[OwnKernel, ...]:
    """The kernels of a source. Runs in a worker. Raises KernelError."""
    with in_a_worker(quiet=False):
        found = kernels_in(source)
        if switches := sorted(toolchain.switches()):
            raise KernelError(f"{source.place} sets {', '.join(switches)}", expected="the compiler as it comes")
        return tuple(OwnKernel(kernel.name, source.of(name), digest_of(kernel.name, kernel.jitted), kernel.own_shapes,
                               kernel.schedules) for name, kernel in found.items())


def digest_of(name: str, jitted: Jitted) -> str:
    """Raises KernelError for a function whose source can't be followed."""
    try:
        return kernel_digest(jitted)
    except Exception as e:  # of Python's tokenizer, of attributes that a user's module computes
        raise KernelError(f"{name}: its source can't be read: {type(e).__name__}: {e}",
                          expected="a @triton.jit function in a file") from None


@contextlib.contextmanager
def in_a_worker(quiet: bool = True) -> Iterator[None]:
    """Around a user's code. Its prints go to stderr, or nowhere where quiet. Triton does without torch until the user's code
    imports it, which would cost each worker a second and 200 MB."""
    sys.stdout.flush()
    saved = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2)
    os.dup2(sink, 1)
    os.close(sink)
    try:
        _forgo_torch()
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _forgo_torch() -> None:
    """Triton's binder imports torch when it is first asked, to know its tensors; it looks only once."""
    from triton._C import libtriton

    if "torch" in sys.modules or not hasattr(libtriton, "native_specialize_impl"):
        return
    sys.meta_path.insert(0, _WithoutTorch)
    try:
        libtriton.native_specialize_impl(type(toolchain.backend_of(90)), 1, False, True, True)
    finally:
        sys.meta_path.remove(_WithoutTorch)


class _WithoutTorch(MetaPathFinder):
    """First in sys.meta_path: an import of torch fails."""

    @classmethod
    def find_spec(cls, name: str, *rest: object) -> None:
        if name == "torch":
            raise ModuleNotFoundError("torch, which a user's kernel has not imported", name=name)
