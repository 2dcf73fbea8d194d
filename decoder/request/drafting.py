"""A request's drafter, which isn't trusted: after a wrong answer, an error or a timeout the request goes on without that draft.

The drafter runs on a thread of its own. It prepares SSD's branches there while the target verifies, and a drafter that never
answers can be abandoned. Every answer is checked: a draft is cut before the first entry that is no token id of the target, and at
the requested length. `stats.drafter_faults` counts faults; `stats.warnings` names the first one of a request. After `MOST_ERRORS`
errors, or one answer later than the decoder's `drafter_timeout_s`, the drafter isn't asked again in this request, which goes on
with one token per round.
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
from .arguments import as_whole, shown

if TYPE_CHECKING:
    import torch

TIMEOUT_S = 120.0  # per answer: a first request may compile the drafter's kernels
MOST_ERRORS = 3  # errors per request, after which the drafter isn't asked again
THREAD = "tune-kernels-drafter"

T = TypeVar("T")


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A checked answer. problem: the fault of the answer, "" for none; raised: the drafter raised an error; started, ended:
    seconds of perf_counter."""

    value: T
    problem: str = ""
    raised: bool = False
    started: float = 0.0
    ended: float = 0.0


Prepared = Future[Answer[Branch]] | None  # pending branches; None if the drafter isn't asked any more


class Worker:
    """A thread that runs one job after another. It is a daemon: a job that never ends doesn't keep the process alive."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def ask(self, name: str, question: Callable[[], Answer[T]], default: T) -> "Future[Answer[T]]":
        """Queues a question. An error becomes an answer with the value `default`."""
        future: Future[Answer[T]] = Future()

        def job() -> None:
            started = time.perf_counter()
            try:
                answer = question()
            except BaseException as e:  # any error of a drafter, SystemExit included
                answer = Answer(default, f"{name} raised {described(e)}", raised=True)
            future.set_result(replace(answer, started=started, ended=time.perf_counter()))

        self.jobs.put(job)
        return future

    def stop(self) -> None:
        """Ends the thread after the queued jobs."""
        self.jobs.put(None)


class Drafting:
    """The drafter of one request. target: answers are checked against its vocabulary and layers; timeout_s: seconds per answer;
    busy: the drafter still works on an earlier request, so this one can't ask it."""

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
        """Whether the drafter's thread still runs."""
        return self.worker.thread.is_alive()

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """See drafter.Drafter.start. A drafter that fails here isn't asked again in this request."""
        before = self.stats.drafter_faults
        self._tell("start", lambda: self.drafter.start(list(tokens), features, chooser))
        self.dismissed = self.dismissed or self.stats.drafter_faults > before

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """A checked draft of at most `length` token ids."""
        return self._ask("draft", lambda: checked_draft(self.drafter.draft(list(tokens), length), length, self.vocab_limit), [])

    def accept(self, outcome: Outcome) -> None:
        """See drafter.Drafter.accept."""
        own = replace(outcome, emitted=list(outcome.emitted))
        self._tell("accept", lambda: self.drafter.accept(own))

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Prepared:
        """Starts the preparation of branches and returns at once. See drafter.Drafter.prepare."""
        if self.dismissed:
            return None
        tokens, draft = list(tokens), list(draft)
        return self.worker.ask("prepare", lambda: checked_branches(
            self.drafter.prepare(tokens, draft, branches, length), branches, length, self.vocab_limit), {})

    def branches(self, prepared: Prepared) -> Branch:
        """Waits for the branches of `prepare`; counts overlap and waiting time in stats."""
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
        """The answer, its problem counted; None after the timeout."""
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
        """Counts a fault, and adds a warning for the first one of the request."""
        if not self.stats.drafter_faults:
            self.stats.warnings.append(f"drafter {self.name}: {problem}; the emitted tokens are the target's own")
        self.stats.drafter_faults += 1

    def close(self, wait_s: float) -> None:
        """Ends the questions and waits for the last answer, at most `wait_s` seconds."""
        self.worker.stop()
        self.worker.thread.join(0 if self.timed_out else wait_s)


def described(error: BaseException) -> str:
    """An error's type and the first line of its text, cut at 200 characters."""
    try:
        text = error.found if isinstance(error, DecoderError) else str(error)
        lines = text.splitlines()
    except Exception:  # a failing __str__
        lines = []
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def checked_layers(layers: Iterable[object], count: int) -> Answer[tuple[int, ...]]:
    """Indices of the target's layers; none if any entry isn't one. count: layers of the target."""
    found = [as_whole(layer) for layer in islice(layers, count + 1)]
    known = tuple(layer for layer in found if layer is not None and 0 <= layer < count)
    if len(known) != len(found) or len(set(known)) != len(known):
        return Answer((), f"feature_layers is {shown(layers)}, for a target of {count} layers")
    return Answer(known)


def checked_draft(draft: object, length: int, limit: int) -> Answer[list[int]]:
    """The draft up to its first entry that is no token id below `limit`, at most `length` tokens."""
    if isinstance(draft, str | bytes | Mapping | set) or not isinstance(draft, Iterable):
        return Answer([], f"the draft is {shown(draft)}, not a list of token ids")
    tokens: list[int] = []
    for item in islice(draft, length + 1):
        token = as_whole(item)
        if token is None or not 0 <= token < limit:
            return Answer(tokens, f"the draft holds {shown(item)}, not a token id below {limit}")
        tokens.append(token)
    if len(tokens) > length:
        return Answer(tokens[:length], f"the draft has more than {length} tokens")
    return Answer(tokens)


def checked_branches(ready: object, branches: int, length: int, limit: int) -> Answer[Branch]:
    """The well-formed branches, at most `branches`; each draft as in `checked_draft`."""
    if not isinstance(ready, Mapping):
        return Answer({}, f"the branches are {shown(ready)}, not a mapping from outcome to draft")
    found: Branch = {}
    problem = f"more than {branches} branches" if len(ready) > branches else ""
    for key, made in islice(ready.items(), branches):
        draft = checked_draft(made, length, limit)
        outcome = tuple(map(as_whole, key)) if isinstance(key, tuple) else ()
        if len(outcome) == 2 and outcome[0] is not None and outcome[1] is not None:
            found[outcome[0], outcome[1]] = draft.value
            problem = problem or draft.problem
        else:
            problem = problem or f"an outcome is {shown(key)}, not (accepted tokens, recovery token)"
    return Answer(found, problem)
