"""The summary before the rows: the change of the whole step's time, the state of bits and evidence."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from ...schedules.promoted import Paired
from ...shapes.errors import ShapeError
from ...shapes.model import ModelShape, load_model_shape, shape_to_dict, shipped_names
from . import words
from .compare import STATUSES, Change, Diff, RowDiff
from .evidence import OTHER_CLASS, installed_kernels
from .times import SAME

ONCE_PER_STEP = ("lm_head", "fc")  # other kernels run once per layer
NOT_IN_THE_STEP = ("lm_head_logits", "lm_head_certified")  # lm_head stands for the head, whichever variant runs
NUMBER_FORMAT = {"dtype": None, "terms": None}  # a shape's fields that the recipe fixes, not the model


NameT = TypeVar("NameT", str, tuple[str, str])


@dataclass(frozen=True)
class Step:
    """The sum of one step's kernel times, each times its number of runs. place: SKU, model, recipe. ratio: new over old.
    interval: of the ratio if all kernels are at the same end of theirs. counted: kernels in the sums. left_out: the model's other
    kernels, which aren't promoted or aren't comparable."""

    place: tuple[str, str, str]
    old_us: float
    new_us: float
    ratio: float
    interval: tuple[float, float]
    layers: int
    counted: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class FullModel:
    """The whole step's time in the full model, new over old, in one mode, measured when these kernels were promoted."""

    mode: str
    paired: Paired
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Numbers of rows: by status; times, bits, evidence by state; weights by name; kernels_changed: kernels with changed source.
    everywhere: differences of place and toolchain in every pair. toolchain: other differences, with their number of rows.
    verdicts: number of variants by (old, new), in reports. artefacts: number of rows by their most important changed fact."""

    statuses: Mapping[str, int]
    steps: tuple[Step, ...]
    full_model: tuple[FullModel, ...]
    times: Mapping[str, int]
    bits: Mapping[str, int]
    evidence: Mapping[str, int]
    weights: Mapping[str, int]
    everywhere: tuple[Change, ...]
    toolchain: tuple[tuple[Change, int], ...]
    kernels_changed: tuple[str, ...]
    verdicts: Mapping[tuple[str, str], int]
    artefacts: Mapping[str, int]


def summarise(diff: Diff) -> Summary:
    rows = diff.rows
    differing = [row for row in rows if row.status in ("changed", "added")]
    everywhere = diff.everywhere
    tools = Counter(c for row in rows for c in row.toolchain if c not in everywhere)
    verdicts = ((row.old.facts.verdict, row.new.facts.verdict) for row in rows
                if row.old and row.new and row.old.facts.verdict and row.new.facts.verdict)
    return Summary(
        {status: diff.count(status) for status in STATUSES}, tuple(_steps(rows)), tuple(_full_model(differing)),
        _sorted(row.time.verdict for row in differing if row.time),
        _sorted(_bits(row) for row in rows if row.bits and row.new),
        _sorted(row.evidence.state for row in rows if row.evidence),
        _sorted(words.weights(row.evidence) for row in rows if row.evidence),
        everywhere, tuple(sorted(tools.items(), key=lambda item: words.change(item[0]))),
        tuple(sorted({row.entry.kernel for row in rows if row.kernel_changed})), _sorted(verdicts),
        dict(Counter(row.facts[0].name for row in rows if row.facts)))


def _sorted(names: Iterable[NameT]) -> dict[NameT, int]:
    return dict(sorted(Counter(names).items()))


def _bits(row: RowDiff) -> str:
    assert row.bits
    if row.old is None:
        return "new"
    if row.bits.verdict != OTHER_CLASS:
        return row.bits.verdict
    return f"{OTHER_CLASS} {'and another recipe' if row.bits.new_recipe else 'in the same recipe'}"


def _steps(rows: Iterable[RowDiff]) -> Iterable[Step]:
    places: dict[tuple[str, str, str], dict[str, RowDiff]] = {}
    for row in rows:
        if row.new and row.time and (model := _model(row.new.model)) and _is_the_models(row, model):
            places.setdefault((row.new.target, row.new.model, row.new.recipe), {})[row.new.kernel] = row
    for place, by_kernel in sorted(places.items()):
        model = _model(place[1])
        assert model
        if step := _step(place, by_kernel, model):
            yield step


@cache
def _model(name: str) -> ModelShape | None:
    try:
        return load_model_shape(name) if name in shipped_names() else None
    except ShapeError:
        return None


def _is_the_models(row: RowDiff, model: ModelShape) -> bool:
    """Whether the row has its kernel's sizes in the model."""
    shapes = model.kernel_shapes()
    sizes = {**shape_to_dict(row.entry.shape), **NUMBER_FORMAT}
    return row.entry.kernel in shapes and {**shape_to_dict(shapes[row.entry.kernel]), **NUMBER_FORMAT} == sizes


def _step(place: tuple[str, str, str], by_kernel: Mapping[str, RowDiff], model: ModelShape) -> Step | None:
    """None if no kernel of the step has comparable times, or none of them changed."""
    old = low = high = new = 0.0
    counted, left_out = [], []
    for kernel in (k for k in model.kernel_shapes() if k not in NOT_IN_THE_STEP):
        time = by_kernel[kernel].time if kernel in by_kernel else None
        if time is None or time.old is None or time.new is None or (time.ratio is None and time.verdict != SAME):
            left_out.append(kernel)
            continue
        times = 1 if kernel in ONCE_PER_STEP else model.num_layers
        was, (least, most) = times * time.old.median_us, time.interval or (1.0, 1.0)
        old, new, low, high = old + was, new + was * (time.ratio or 1.0), low + was * least, high + was * most
        counted.append(kernel)
    if not counted or new == old:
        return None
    return Step(place, old, new, new / old, (low / old, high / old), model.num_layers, tuple(counted), tuple(left_out))


def _full_model(rows: Iterable[RowDiff]) -> Iterable[FullModel]:
    """One entry per measurement, which kernels promoted together share."""
    found: dict[tuple[str, Paired], list[str]] = {}
    for row in rows:
        promoted = row.new.promoted if row.new else None
        for mode, paired in sorted((promoted.evidence.full_model if promoted else {}).items()):
            found.setdefault((mode, paired), []).append(row.entry.kernel)
    return [FullModel(mode, paired, tuple(dict.fromkeys(kernels))) for (mode, paired), kernels in found.items()]


def lines(diff: Diff, summary: Summary) -> list[tuple[str, str]]:
    """The summary as (label, text), in order of importance."""
    counts = ", ".join(f"{n:,} {status}" for status, n in summary.statuses.items() if n)
    found = [("rows", counts or "no promoted schedules on either side")]
    found += [("step", _step_words(step)) for step in summary.steps]
    found += [("full model", f"{f.mode}: {words.change_of(f.paired.ratio, f.paired.interval)} per step, measured at the "
               f"promotion of {', '.join(f.kernels)}") for f in summary.full_model]
    found += [(label, ", ".join(f"{n:,} {name}" for name, n in by_name.items()))
              for label, by_name in (("times", summary.times), ("bits", summary.bits), ("evidence", summary.evidence),
                                     ("weights", summary.weights)) if by_name]
    found += [("verdicts", f"{n:,} {old}, now {new}") for (old, new), n in summary.verdicts.items() if old != new]
    if summary.artefacts:
        named = ((words.FACT_NAMES.get(name, name), n) for name, n in summary.artefacts.items())
        found.append(("differ in", ", ".join(f"{name} {n:,}" for name, n in named)))
    if summary.kernels_changed:
        found.append(("kernel source", f"changed in {', '.join(summary.kernels_changed)}"))
    if diff.kernels and diff.kernels != installed_kernels():
        found.append(("checked against", diff.kernels.name))
    if summary.everywhere:
        found.append(("everywhere", ", ".join(map(words.change, summary.everywhere))))
    found += [("toolchain", f"{words.change(c)} in {words.counted(n, 'row')}") for c, n in summary.toolchain]
    return found


def _step_words(step: Step) -> str:
    left = f"; without {', '.join(step.left_out)}: not promoted or not comparable" if step.left_out else ""
    return (f"kernels of one step, {step.layers} layers, on {', '.join(step.place)}: {step.old_us:,.1f} → {step.new_us:,.1f} µs, "
            f"{words.change_of(step.ratio, step.interval)} ({', '.join(step.counted)}{left})")
