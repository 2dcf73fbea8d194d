"""The results of one `verify`, as JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from ...schedules.promoted import PromotedSchedule
from ...shapes.fields import Table
from ...shapes.files import replace_text
from ..errors import writing
from .check import KINDS, CheckResult

SCHEMA = "tune-kernels/decoder-evidence/1"


@dataclass
class Evidence:
    """Every check of a run. weights: `path:NAME` or `random:SEED`; fingerprint: of the tensors; prompts: number of different
    prompts in the agreement checks; tokens_hash: SHA-256 of the tokens that the checks emitted; not_run: skipped checks, with the
    reason; in_use: the promoted rows that `--promote` upgrades."""

    weights: str
    fingerprint: str
    recipe: str
    backend: str
    results: list[CheckResult] = field(default_factory=list)
    prompts: int = 0
    tokens_compared: int = 0
    tokens_hash: str = ""
    not_run: list[str] = field(default_factory=list)
    in_use: tuple[PromotedSchedule, ...] = ()

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def counts(self) -> dict[str, dict[str, int]]:
        """Checks run and passed, by kind."""
        return {kind: {"run": sum(r.kind == kind for r in self.results),
                       "passed": sum(r.kind == kind and r.passed for r in self.results)} for kind in KINDS}

    def to_dict(self) -> Table:
        """The JSON of the evidence file."""
        return {"schema": SCHEMA, "weights": self.weights, "fingerprint": self.fingerprint, "recipe": self.recipe,
                "backend": self.backend, "random_weights": self.weights.startswith("random:"), "passed": self.passed,
                "checks": self.counts(), "not_run": self.not_run, "prompts": self.prompts,
                "tokens_compared": self.tokens_compared, "tokens_hash": self.tokens_hash,
                "results": [r.to_dict() for r in self.results]}

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all. Raises RequestError if that fails."""
        with writing(path):
            replace_text(path, json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n", durable=True)
