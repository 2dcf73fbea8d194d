"""The interface of a kernel's case: its launches for checks, classes and timings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    Outputs = tuple[torch.Tensor, ...]

S = TypeVar("S", contravariant=True)


class Case(Protocol[S]):
    """One kernel on one shape's operands. All its launches for checks and timings are made here. Candidates share the operands:
    each launch takes a schedule."""

    def whole(self, schedule: S) -> "Outputs":
        """All outputs of one launch into poisoned memory."""

    def wrong(self, whole: "Outputs", schedule: S) -> tuple[float, str]:
        """(relative RMS error against fp64, why that is too much). NaN if an output has a NaN; an empty string if it is right."""

    def row_pairs(self, schedule: S, whole: "Outputs") -> "Iterator[tuple[str, Outputs, Outputs]]":
        """(description, outputs of a row or some rows alone, the same rows of `whole`): equal bytes if no row depends on another.
        None of a kernel without rows."""

    def timed(self, schedule: S, copy: int) -> None:
        """One launch for a timing, on one copy of the large operands."""

    def bits(self, schedule: S) -> "Iterator[torch.Tensor]":
        """Endless outputs for the numerics class, of varying inputs. Entries that the kernel leaves unwritten keep the poison of
        `poisoned`."""


class RowsCase(Case[S], Protocol[S]):
    """A case whose launches take any number of rows, up to its schedule's."""

    def limit(self, schedule: S) -> float:
        """The recipe's limit of this schedule's error."""

    def rows(self, schedule: S) -> int:
        """Number of rows that a launch with this schedule is checked with."""

    def output(self, schedule: S, first: int, rows: int) -> "torch.Tensor":
        """Output [rows, ...] of rows first .. first + rows - 1, as `error` takes it."""

    def error(self, output: "torch.Tensor") -> float:
        """Relative RMS error of `output(schedule, 0, n)` against fp64; NaN if the output has a NaN."""

    def whole(self, schedule: S) -> "Outputs":
        return (self.output(schedule, 0, self.rows(schedule)),)

    def wrong(self, whole: "Outputs", schedule: S) -> tuple[float, str]:
        error, limit = self.error(whole[0]), self.limit(schedule)
        if error <= limit:
            return error, ""
        return error, unwritten(whole[0]) or (f"relative RMS error {error:.2e} against fp64, at most {limit:.0e} in this recipe")

    def row_pairs(self, schedule: S, whole: "Outputs") -> "Iterator[tuple[str, Outputs, Outputs]]":
        y = whole[0]
        for rows in range(1, len(y)):
            yield f"{rows} rows of {len(y)}", (self.output(schedule, 0, rows),), (y[:rows],)
        for r in range(len(y)):
            yield f"row {r} alone", (self.output(schedule, r, 1),), (y[r:r + 1],)


def unwritten(output: "torch.Tensor") -> str:
    """A message on outputs that are still poison, or an empty string."""
    import torch

    if output.dtype is torch.bool:
        return ""  # both values are results
    poison = output.float().isnan() if output.is_floating_point() else output == torch.iinfo(output.dtype).max
    left = int(poison.sum())
    return f"{left} of {output.numel()} outputs were not written, or are NaN" if left else ""


def same(a: "Outputs", b: "Outputs") -> bool:
    """Whether outputs are equal byte for byte: NaN equals itself, 0.0 differs from -0.0."""
    import torch

    return len(a) == len(b) and all(torch.equal(bytes_of(one), bytes_of(other)) for one, other in zip(a, b))


def bytes_of(output: "torch.Tensor") -> "torch.Tensor":
    """[bytes] uint8."""
    import torch

    return output.contiguous().reshape(-1).view(torch.uint8)
