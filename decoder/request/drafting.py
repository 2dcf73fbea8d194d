"""A request's drafter, trusted with nothing: whatever it returns, raises or does not do, the request goes on without that draft.

The drafter works on a thread of its own, so that SSD's branches are prepared while the target verifies, and so that a drafter
that never answers can be left alone. Every answer is checked: a draft is cut before the first entry that is no token id of the
target, and at the length asked for. A fault is counted in `stats.drafter_faults`; the first one of a request is named in
`stats.warnings`. After `MOST_ERRORS` errors, or one answer that took longer than the decoder's `drafter_timeout_s`, the drafter
is not asked again in this request, which goes on one token per round.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from ..backend import Model
from ..drafter import Branch, Drafter, Outcome, name_of
from ..errors import DecoderError
from ..sampling import Chooser
from ..stats import Stats
from .arguments import as_id, shown

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 120.0  # for one answer: a first request may compile the drafter's kernels
MOST_ERRORS = 3
THREAD = "tune-kernels-drafter"

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A checked answer, and what was wrong with it, if anything. raised: an error came in its place; started and ended in seconds
    of perf_counter."""

    value: T
    problem: str = ""
    raised: bool = False
    started: float = 0.0
    ended: float = 0.0


Prepared = Future[Answer[Branch]] | None  # branches to come; None if the drafter isn't asked any more


class Worker:
    """A thread that does one job after another. A daemon: a job that never ends doesn't keep the process."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def ask(self, name: str, question: Callable[[], Answer[T]], default: T) -> "Future[Answer[T]]":
        """The answer to come; an error becomes an answer as well. default: its value then."""
        future: Future[Answer[T]] = Future()

        def job() -> None:
            started = time.perf_counter()
            try:
                answer = question()
            except BaseException as e:  # whatever a drafter raises, SystemExit included
                answer = Answer(default, f"{name} raised {described(e)}", raised=True)
            future.set_result(replace(answer, started=started, ended=time.perf_counter()))

        self.jobs.put(job)
        return future

    def stop(self) -> None:
        """Lets the thread end after the jobs it has."""
        self.jobs.put(None)


class Drafting:
    """The drafter of one request. target: whose token ids and layers its answers must name; busy: whether it still works on an
    earlier request, and so can't be asked."""

    def __init__(self, drafter: Drafter, target: Model, stats: Stats, timeout_s: float, busy: bool = False) -> None:
        self.drafter, self.vocab_limit, self.stats, self.timeout_s = drafter, target.vocab_limit, stats, timeout_s
        self.name = name_of(drafter)
        self.worker, self.errors, self.dismissed, self.timed_out = Worker(), 0, busy, busy
        if busy:
            self.fault("has not answered an earlier request yet")
        layers = target.shape.num_layers
        none: tuple[int, ...] = ()
        self.feature_layers = self._ask("feature_layers", lambda: checked_layers(drafter.feature_layers, layers), none)

    @property
    def busy(self) -> bool:
        """Whether its thread still works for this drafter."""
        return self.worker.thread.is_alive()

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """See drafter.Drafter.start. A drafter that fails here isn't asked again."""
        before = self.stats.drafter_faults
        self._tell("start", lambda: self.drafter.start(list(tokens), features, chooser))
        self.dismissed = self.dismissed or self.stats.drafter_faults > before

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """At most `length` token ids."""
        return self._ask("draft", lambda: checked_draft(self.drafter.draft(list(tokens), length), length, self.vocab_limit), [])

    def accept(self, outcome: Outcome) -> None:
        """See drafter.Drafter.accept."""
        own = replace(outcome, emitted=list(outcome.emitted))
        self._tell("accept", lambda: self.drafter.accept(own))

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Prepared:
        """Begins to prepare branches; returns at once."""
        if self.dismissed:
            return None
        tokens, draft = list(tokens), list(draft)
        return self.worker.ask("prepare", lambda: checked_branches(
            self.drafter.prepare(tokens, draft, branches, length), branches, length, self.vocab_limit), {})

    def branches(self, prepared: Prepared) -> Branch:
        """The branches of `prepare`, waited for if need be."""
        if prepared is None:
            return {}
        verified = time.perf_counter()
        answer = self._wait("prepare", prepared)
        self.stats.sync_s += time.perf_counter() - verified
        if answer is None:
            return {}
        self.stats.overlap_s += max(min(verified, answer.ended) - answer.started, 0.0)
        return answer.value

    def _tell(self, name: str, call: Callable[[], None]) -> None:
        def question() -> Answer[None]:
            call()
            return Answer(None)

        self._ask(name, question, None)

    def _ask(self, name: str, question: Callable[[], Answer[T]], default: T) -> T:
        if self.dismissed:
            return default
        answer = self._wait(name, self.worker.ask(name, question, default))
        return default if answer is None else answer.value

    def _wait(self, name: str, future: "Future[Answer[T]]") -> Answer[T] | None:
        """The answer, with its problem counted; None if it takes too long."""
        try:
            answer = future.result(self.timeout_s)
        except TimeoutError:
            self.dismissed = self.timed_out = True
            self.fault(f"{name} has not answered in {self.timeout_s:g} s")
            return None
        if answer.problem:
            self.errors += answer.raised
            self.dismissed = self.dismissed or self.errors >= MOST_ERRORS
            self.fault(answer.problem)
        return answer

    def fault(self, problem: str) -> None:
        """Counts a fault; names the first one."""
        if not self.stats.drafter_faults:
            self.stats.warnings.append(f"drafter {self.name}: {problem}; the tokens are the target's own all the same")
        self.stats.drafter_faults += 1

    def close(self, wait_s: float) -> None:
        """No more questions; waits for the last answer, at most `wait_s`."""
        self.worker.stop()
        self.worker.thread.join(0 if self.timed_out else wait_s)


def described(error: BaseException) -> str:
    """An error by its type and the first line of its text."""
    try:
        text = error.found if isinstance(error, DecoderError) else str(error)
        lines = text.splitlines()
    except Exception:  # its own text fails
        lines = []
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def checked_layers(layers: Iterable[object], count: int) -> Answer[tuple[int, ...]]:
    """Indices of the target's layers; none where one isn't."""
    found = [as_id(layer) for layer in islice(layers, count + 1)]
    known = tuple(layer for layer in found if layer is not None and 0 <= layer < count)
    if len(known) != len(found) or len(set(known)) != len(known):
        return Answer((), f"feature_layers is {shown(layers)}, for a target of {count} layers")
    return Answer(known)


def checked_draft(draft: object, length: int, limit: int) -> Answer[list[int]]:
    """The token ids that a draft begins with, at most `length`."""
    if isinstance(draft, str | bytes | Mapping | set) or not isinstance(draft, Iterable):
        return Answer([], f"a draft is {shown(draft)}, no list of token ids")
    tokens: list[int] = []
    for item in islice(draft, length + 1):
        token = as_id(item)
        if token is None or not 0 <= token < limit:
            return Answer(tokens, f"a draft holds {shown(item)}, no token id below {limit}")
        tokens.append(token)
    if len(tokens) > length:
        return Answer(tokens[:length], f"a draft of more than {length} tokens")
    return Answer(tokens)


def checked_branches(ready: object, branches: int, length: int, limit: int) -> Answer[Branch]:
    """The branches whose outcome and draft are well formed, at most `branches`."""
    if not isinstance(ready, Mapping):
        return Answer({}, f"branches are {shown(ready)}, no table of drafts by outcome")
    found: Branch = {}
    problem = f"more than {branches} branches" if len(ready) > branches else ""
    for key, made in islice(ready.items(), branches):
        draft = checked_draft(made, length, limit)
        outcome = tuple(map(as_id, key)) if isinstance(key, tuple) else ()
        if len(outcome) == 2 and outcome[0] is not None and outcome[1] is not None:
            found[outcome[0], outcome[1]] = draft.value
            problem = problem or draft.problem
        else:
            problem = problem or f"an outcome is {shown(key)}, not (accepted tokens, recovery token)"
    return Answer(found, problem)
