"""The words and numbers of a difference, shared by all formats."""

from collections.abc import Sequence
from dataclasses import replace

from ...schedules.promoted import NO_WEIGHTS, Distribution
from ...schedules.recipe import OWN
from ...schedules.schedule import knobs_of
from ...shapes.model import KernelShape, dims_of
from ..offline.report import describe_schedule
from .compare import Change, Facts, RowDiff, Value, changes, knobs_in
from .evidence import OTHER_CLASS, EvidenceState
from .times import NOT_COMPARABLE, SAME, TimeChange

FACT_NAMES = {"spill_store_bytes": "spill stores B", "spill_load_bytes": "spill loads B", "stack_bytes": "stack B",
              "shared_bytes": "shared B", "tmem_columns": "TMEM columns", "blocks_per_sm": "blocks/SM",
              "cubin_sha256": "machine code alone", "reasons": "reject reasons"}
NONE = "–"


def row_name(row: RowDiff) -> str:
    """`down N 3584, K 18944, e4m3 on nvidia-h200, qwen2.5-7b, fp8-v1`; a report's variant with its schedule."""
    entry = row.entry
    named = [] if entry.recipe == OWN.name else [entry.model, entry.recipe]
    places = [entry.target, *named, *([schedule(row)] if entry.promoted is None else [])]
    return f"{entry.kernel} {shape(entry.shape)} on {', '.join(p for p in places if p)}"


def shape(sizes: KernelShape) -> str:
    """`N 3584, K 18944, e4m3`, without false fields and a single term."""
    shown = {k: v for k, v in dims_of(sizes).items() if v is not False and (k, v) != ("terms", 1)}
    return ", ".join(str(v) if isinstance(v, str) else k if v is True else f"{k} {v}" for k, v in shown.items())


def value(found: Value) -> str:
    """`1,024`, `true`, `QGMMA HGMMA`, or a dash for an unknown value."""
    if found is None:
        return NONE
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, int):
        return f"{found:,}"
    return " ".join(found) or "none" if isinstance(found, tuple) else str(found)


def fact(one: Change) -> str:
    """As `change`, with a fact's display name."""
    return change(replace(one, name=FACT_NAMES.get(one.name, one.name)))


def change(one: Change) -> str:
    """`num_stages 3 → 4`."""
    return f"{one.name} {value(one.old)} → {value(one.new)}"


def change_of(ratio: float, interval: tuple[float, float]) -> str:
    """A ratio new/old with its 95% interval, as `−6.3% [−6.8, −5.9]`."""
    low, high = interval
    return f"{percent(ratio)}% [{percent(low)}, {percent(high)}]"


def percent(ratio: float) -> str:
    """The change in percent, with a typographic minus; `0.0` without a sign."""
    text = f"{100 * (ratio - 1):+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def times(found: Distribution | None) -> str:
    """`34.90 [34.85, 34.97] µs`: the median with its 95% interval."""
    if found is None:
        return NONE
    digits = 1 if found.median_us >= 100 else 2
    low, high = found.interval_us
    return f"{found.median_us:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] µs"


def time_verdict(time: TimeChange | None) -> str:
    """`faster −6.3% [−6.8, −5.9]`, `tie …`, `not comparable: other driver: …`, or an empty string if nothing was timed."""
    if time is None:
        return ""
    if time.verdict == SAME:
        return "same measurement"
    if time.verdict == NOT_COMPARABLE:
        return f"{time.verdict}: {time.why}"
    assert time.ratio is not None and time.interval is not None
    return f"{time.verdict} {change_of(time.ratio, time.interval)}"


def weights(state: EvidenceState) -> str:
    """`weights NAME`, `RANDOM WEIGHTS (random:0)`, or `no decoder asked`."""
    if state.weights == NO_WEIGHTS:
        return "no decoder asked"
    return f"RANDOM WEIGHTS ({state.weights})" if state.random else f"weights {state.weights.removeprefix('path:')}"


def evidence(state: EvidenceState | None) -> str:
    """`present: 12 of 12 checks, RANDOM WEIGHTS (random:0)`."""
    if state is None:
        return ""
    run, passed = sum(c.run for c in state.checks.values()), sum(c.passed for c in state.checks.values())
    return f"{state.state}: {passed} of {run} checks, {weights(state)}"


def checks(state: EvidenceState) -> str:
    """Passed checks of each kind: `reference 1/1, rows 9/9`."""
    return ", ".join(f"{kind} {c.passed}/{c.run}" for kind, c in sorted(state.checks.items())) or "none"


def knobs(row: RowDiff) -> list[str]:
    """The changed knobs. Without any: the whole schedule, and for an added row the different knobs of the schedule before it."""
    promoted = row.new.promoted if row.new else None
    before = promoted.timing.previous if promoted and row.old is None else None
    differs = changes(knobs_in(before.schedule), knobs_in(row.entry.schedule)) if before else ()
    was = [f"before: {', '.join(f'{c.name} {value(c.old)}' for c in differs)}"] if differs else []
    return [change(c) for c in row.knobs] or [schedule(row), *was]


def artefact(row: RowDiff) -> list[str]:
    """The artefact's changes; for a row with one side, its facts."""
    if row.old is None or row.new is None:
        return _known(row.entry.facts)
    old, new = row.old.facts, row.new.facts
    if old.verdict != new.verdict:
        return [f"{_verdict(old)} → {_verdict(new)}", *_known(old if new.rejected else new)]
    found = [fact(c) for c in row.facts if c.name != "cubin_sha256"]
    return found or (["other machine code, equal facts"] if row.facts else [])


def _verdict(facts: Facts) -> str:
    return f"rejected ({value(facts.reasons)})" if facts.rejected else str(facts.verdict)


def _known(facts: Facts) -> list[str]:
    if facts.rejected:
        return [_verdict(facts)]
    spilled = f"spills {value(facts.spill_store_bytes)} B, loads {value(facts.spill_load_bytes)} B"
    return [" ".join(facts.instructions or ()) or "no tensor-core instruction", f"{value(facts.registers)} registers",
            spilled if facts.spill_store_bytes or facts.spill_load_bytes else "no spill"]


def whole_artefact(row: RowDiff) -> list[str]:
    """All known facts of `entry`'s artefact."""
    facts = row.entry.facts
    rest = {"stack_bytes": facts.stack_bytes, "shared_bytes": facts.shared_bytes, "tmem_columns": facts.tmem_columns,
            "blocks_per_sm": facts.blocks_per_sm}
    return [*_known(facts), *(f"{value(n)} {FACT_NAMES[name]}" for name, n in rest.items() if n and not facts.rejected)]


def bits(row: RowDiff) -> str:
    """`same class`, or another class with its consequence."""
    if row.bits is None or row.status == "removed":
        return ""
    if row.status == "added":
        return f"class {(row.bits.new_class or '')[:12]}"
    if row.bits.verdict != OTHER_CLASS:
        return row.bits.verdict + (f": {row.bits.why}" if row.bits.why else "")
    old, new = ((c or "")[:12] for c in (row.bits.old_class, row.bits.new_class))
    recipe = "and so another recipe" if row.bits.new_recipe else "IN THE SAME RECIPE"
    return f"{OTHER_CLASS} {recipe}: {old} → {new}"


def notes(row: RowDiff, everywhere: Sequence[Change] = ()) -> list[str]:
    """Changes of place, toolchain and kernel source, without those that every row has."""
    found = [change(c) for c in (*row.places, *row.toolchain) if c not in everywhere]
    return [*found, "kernel source changed"] if row.kernel_changed else found


def schedule(row: RowDiff) -> str:
    """The whole schedule of `entry`, in words."""
    return describe_schedule(knobs_of(row.entry.schedule))


def counted(count: int, what: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
