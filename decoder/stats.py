"""The counters and times of a request. Ratios are pooled over its rounds, never averaged per round."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..shapes.fields import Table

MODES = ("ar", "sd", "ssd")


@dataclass
class Stats:
    """Of one request, or pooled over several.

    drafted, accepted: tokens verified and accepted. If the end of a request cuts a round, drafted tokens past the cut count in
    neither. emitted: tokens of rounds; the first token of a request comes from the prompt's pass. drafter_faults: missing, late
    or wrong answers of the drafter, and on the device drafts beside which the target had no answer; `warnings` names the first.
    head_rescored, head_unbounded: ids that a certified head computed again, and its launches with a row that it couldn't bound
    and read in full.

    reused_tokens: of the prompt, those whose keys a chat's turn before left in the cache.

    Times in seconds. overlap_s: drafter and target both run; sync_s: the target waits for the drafter's branches; host_s: work of
    Python in rounds on the device, without waiting; capture_s: capture of graphs before the first round, in neither prefill_s nor
    decode_s. round_s: one entry per round.

    rounds_by_draft_length: rounds of each K that draft_length="auto" asked for, 0 for AR; empty with a fixed K. hits_by_accepted,
    misses_by_accepted: branch hits and misses by the accepted tokens of the round.
    """

    mode: str = "ar"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    branch_hits: int = 0
    branch_misses: int = 0
    drafter_faults: int = 0
    head_rescored: int = 0
    head_unbounded: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sync_s: float = 0.0
    overlap_s: float = 0.0
    host_s: float = 0.0
    capture_s: float = 0.0
    round_s: list[float] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    drafted_per_round: list[int] = field(default_factory=list)
    rounds_by_draft_length: dict[int, int] = field(default_factory=dict)
    hits_by_accepted: dict[int, int] = field(default_factory=dict)
    misses_by_accepted: dict[int, int] = field(default_factory=dict)
    seed: int | None = None
    backend: str = ""
    device: str = ""
    launches_per_token: float | None = None
    schedules: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens_per_round(self) -> float:
        """tau, which counts the recovery token; 1 for AR."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens, 0..1."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def hit_rate(self) -> float:
        """Branch hits over rounds that prepared branches, 0..1."""
        asked = self.branch_hits + self.branch_misses
        return self.branch_hits / asked if asked else 0.0

    @property
    def decision(self) -> str:
        """The draft lengths that draft_length="auto" took; empty with a fixed K."""
        rounds = sorted(self.rounds_by_draft_length.items())
        taken = ", ".join(f"{'AR' if not k else f'SD K = {k}'}: {count} rounds" for k, count in rounds)
        return f"auto took {taken}" if taken else ""

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each place in a draft: its accepted tokens over the rounds that drafted it and accepted all before it, 0..1."""
        rounds = list(zip(self.drafted_per_round, self.accepted_per_round))
        reached = [[accepted for drafted, accepted in rounds if drafted > i and accepted >= i]
                   for i in range(max(self.drafted_per_round, default=0))]
        return [sum(accepted > i for accepted in of) / len(of) if of else 0.0 for i, of in enumerate(reached)]

    @property
    def decode_tokens_per_s(self) -> float:
        return self.emitted / self.decode_s if self.decode_s else 0.0

    def count_round(self, drafted: int, accepted: int, kept: int) -> None:
        """Counts a round. kept: emitted tokens, at most accepted + 1; fewer if the request ended inside the round."""
        cut = kept < accepted + 1
        self.rounds += 1
        self.emitted += kept
        self.drafted += kept if cut else drafted
        self.accepted += kept if cut else accepted
        self.accepted_per_round.append(kept if cut else accepted)
        self.drafted_per_round.append(kept if cut else drafted)

    def count_draft_length(self, length: int) -> None:
        """Counts a round of a chosen draft length."""
        self.rounds_by_draft_length[length] = self.rounds_by_draft_length.get(length, 0) + 1

    def count_branch(self, accepted: int, hit: bool) -> None:
        """Counts a branch hit or miss after a round that accepted so many tokens."""
        self.branch_hits, self.branch_misses = self.branch_hits + hit, self.branch_misses + (not hit)
        counts = self.hits_by_accepted if hit else self.misses_by_accepted
        counts[accepted] = counts.get(accepted, 0) + 1

    def to_dict(self) -> Table:
        """Every field, and the ratios, for JSON."""
        ratios = {name: getattr(self, name) for name in
                  ("tokens_per_round", "acceptance", "acceptance_by_position", "hit_rate", "decode_tokens_per_s", "decision")}
        return dataclasses.asdict(self) | ratios


def pooled(stats: Sequence[Stats]) -> Stats:
    """The sums of the counters and times of several requests."""
    return Stats(**{f.name: sum(getattr(s, f.name) for s in stats) for f in dataclasses.fields(Stats) if f.type in (int, float)})
