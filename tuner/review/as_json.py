"""A difference as JSON, with sorted keys."""

import dataclasses
import json

from ...schedules.promoted import PromotedSchedule, row_to_dict
from ...schedules.schedule import schedule_to_dict
from ...shapes.errors import UNPRINTABLE
from ...shapes.model import shape_to_dict
from .compare import Diff, Entry, RowDiff
from .summary import Summary, summarise

SCHEMA = "tune-kernels/diff/1"


def diff_to_dict(diff: Diff) -> dict[str, object]:
    return {"schema": SCHEMA, "old": diff.old, "new": diff.new, "kind": diff.kind, "summary": _summary(summarise(diff)),
            "findings": [dataclasses.asdict(f) for f in diff.findings], "rows": [_row(row) for row in diff.rows]}


def render_json(diff: Diff, indent: int | None = 1) -> str:
    """indent: None gives one line."""
    text = json.dumps(diff_to_dict(diff), indent=indent, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"  # inside strings: JSON has none elsewhere


def _summary(summary: Summary) -> dict[str, object]:
    table = dataclasses.asdict(summary)
    table["toolchain"] = [{**dataclasses.asdict(change), "rows": n} for change, n in summary.toolchain]
    table["verdicts"] = [{"old": old, "new": new, "variants": n} for (old, new), n in summary.verdicts.items()]
    return table


def _row(row: RowDiff) -> dict[str, object]:
    parts = ("knobs", "facts", "toolchain", "places")
    return {"id": row.id, "status": row.status, "kernel": row.entry.kernel, "shape": shape_to_dict(row.entry.shape),
            "old": _entry(row.old), "new": _entry(row.new), "kernel_changed": row.kernel_changed,
            **{name: [dataclasses.asdict(c) for c in getattr(row, name)] for name in parts},
            **{name: dataclasses.asdict(found) if (found := getattr(row, name)) else None
               for name in ("time", "bits", "evidence", "code")},
            "findings": [f.code for f in row.findings]}


def _entry(entry: Entry | None) -> dict[str, object] | None:
    """The fields that the row doesn't have; its lines are in `code`."""
    if entry is None:
        return None
    fields = ("target", "model", "recipe", "identity", "kernel_digest")
    return {**{name: getattr(entry, name) for name in fields}, "schedule": schedule_to_dict(entry.schedule),
            "facts": vars(entry.facts), "toolchain": dict(entry.toolchain), "promoted": _promoted(entry.promoted)}


def _promoted(row: PromotedSchedule | None) -> dict[str, object] | None:
    """The fields of a promoted row that aren't elsewhere in the entry."""
    if row is None:
        return None
    table = row_to_dict(row)
    return {name: table[name] for name in ("date", "evidence", "numerics_class", "recorded", "timing")}
