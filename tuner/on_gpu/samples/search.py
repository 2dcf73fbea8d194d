"""Search in large spaces: Optuna's TPE proposes, its storage holds the results, and many machines can share one study.

A trial claims a variant: it is created with the variant's knobs. Trials of a study are numbered; of two that claim one variant,
the lower number owns it. So no variant is measured twice. A trial's value is the ratio of its time to the incumbent's in the same
rounds, which is comparable between machines."""

import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ....schedules.schedule import Schedule, knobs_of
from ...errors import StorageError
from .race import Timed
from .timing import RACE, Batch, paired, ratios

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna import Trial
    from optuna.storages import JournalStorage

AT_ONCE = 8  # candidates that are claimed and timed together
FIRST_ROUNDS, MORE_ROUNDS = 6, 18  # of every candidate; of unpruned ones
ATTEMPTS = 4  # to open a storage
STARTUP = 16  # random trials before TPE proposes
# None is a dependency; for one that is missing.
DRIVERS = {"postgresql": "pip install psycopg2-binary; or postgresql+psycopg:// with pip install 'psycopg[binary]'",
           "mysql": "pip install mysqlclient; or mysql+pymysql:// with pip install pymysql"}
VARIANT, TOKEN = "variant", "token"  # a trial's attributes: its variant, a unique value


class Study:
    """One kernel's search, shared through a storage. candidates: schedule by name, equal on every machine. Raises
    StorageError."""

    def __init__(self, storage: str, name: str, candidates: Mapping[str, Schedule], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.candidates = {n: knobs_of(s) for n, s in candidates.items()}
        digest = hashlib.sha256(json.dumps(sorted(self.candidates)).encode()).hexdigest()[:12]
        knobs = next(iter(self.candidates.values()))
        values = {k: list(dict.fromkeys(c[k] for c in self.candidates.values())) for k in knobs}
        self.space = {k: optuna.distributions.CategoricalDistribution(sorted(v, key=str)) for k, v in values.items()}
        self.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP,
                                                    constant_liar=False)  # claim excludes running trials
        self.random = random.Random(seed)
        self.optuna = optuna
        self.study = self._opened(storage, f"{name}/{digest}")

    def _opened(self, storage: str, name: str) -> "OptunaStudy":
        """The study, created if it doesn't exist. Retries: several machines may create a new database's tables at once."""
        for attempt in range(ATTEMPTS):
            try:
                return self.optuna.create_study(
                    storage=_storage(storage), study_name=name, load_if_exists=True, sampler=self.sampler,
                    pruner=self.optuna.pruners.MedianPruner(n_startup_trials=STARTUP))
            except Exception as e:  # any driver of any database
                if attempt == ATTEMPTS - 1 or isinstance(e, ImportError):
                    raise StorageError(f"storage {storage!r}: {type(e).__name__}: {e}"[:400],
                                       expected="a file, or a URL of a database with a driver that SQLAlchemy finds",
                                       action=DRIVERS.get(storage.partition(":")[0], "")) from None
                time.sleep(0.5 + self.random.random())
        raise AssertionError("unreachable")

    def claim(self) -> "tuple[Trial, str] | None":
        """A trial and the variant that it now owns; None if all variants are claimed."""
        while left := [name for name in self.candidates if name not in self._owners()]:
            name, token = self._proposed(left), uuid.uuid4().hex
            self.study.add_trial(self.optuna.trial.create_trial(
                state=self.optuna.trial.TrialState.RUNNING, params=self.candidates[name], distributions=self.space,
                user_attrs={VARIANT: name, TOKEN: token}))
            mine = next(t for t in self.study.get_trials(deepcopy=False) if t.user_attrs.get(TOKEN) == token)
            if self._owners()[name] == mine.number:
                return self.optuna.trial.Trial(self.study, mine._trial_id), name
            self.study.tell(mine.number, state=self.optuna.trial.TrialState.FAIL)
        return None

    def _owners(self) -> dict[str, int]:
        """Number of the owning trial by claimed variant."""
        owners: dict[str, int] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if (name := trial.user_attrs.get(VARIANT)) is not None:
                owners[name] = min(trial.number, owners.get(name, trial.number))
        return owners

    def _proposed(self, left: Sequence[str]) -> str:
        """The remaining variant nearest to TPE's proposal; a random one during startup."""
        wanted = self.sampler.sample_relative(self.study, self.optuna.trial.create_trial(value=0.0), self.space)
        if not wanted:
            return self.random.choice(left)
        return max(left, key=lambda n: (sum(self.candidates[n][k] == v for k, v in wanted.items()), n))

    def report(self, trial: "Trial", value: float, step: int) -> bool:
        """Report a first value. Returns whether the trial isn't pruned."""
        trial.report(value, step)
        return not trial.should_prune()

    def finish(self, trial: "Trial", value: float | None, pruned: bool = False) -> None:
        """End a trial. value: None if the candidate failed."""
        states = self.optuna.trial.TrialState
        if value is None or pruned:
            self.study.tell(trial, state=states.PRUNED if pruned else states.FAIL)
        else:
            self.study.tell(trial, value)

    def release(self, trial: "Trial") -> None:
        """Give up a variant that throttling kept from being timed."""
        trial.set_user_attr(VARIANT, None)
        self.finish(trial, None)

    def best(self, count: int, wanted: Callable[[str], bool]) -> list[str]:
        """The `count` fastest completed variants of all machines for which `wanted` holds."""
        done = [t for t in self.study.get_trials(deepcopy=False) if t.state == self.optuna.trial.TrialState.COMPLETE
                and t.user_attrs.get(VARIANT) in self.candidates and wanted(t.user_attrs[VARIANT])]
        return list(dict.fromkeys(t.user_attrs[VARIANT] for t in sorted(done, key=lambda t: t.value)))[:count]


def search(study: Study, base: str, admit: Callable[[str], bool], timed: Timed, out_of_time: Callable[[], bool]) -> list[Batch]:
    """Claim, check, time and report candidates until all are measured, time is up, or throttling spoils a batch. Returns the
    batches.

    Args:
        base: the candidate in every batch.
        admit: runs a candidate's checks; whether it passed.
    """
    batches: list[Batch] = []
    while not out_of_time():
        claimed = [c for c in (study.claim() for _ in range(AT_ONCE)) if c]
        if not claimed:
            break
        fit = []
        for trial, name in claimed:
            if name != base and admit(name):
                fit.append((trial, name))
            else:
                study.finish(trial, 1.0 if name == base else None)
        for rounds in (FIRST_ROUNDS, MORE_ROUNDS):
            batch = timed(RACE, [base, *(name for _, name in fit)], rounds) if fit else None
            batches += [batch] if batch else []
            if batch and not batch.enough:
                for trial, _ in fit:
                    study.release(trial)
                return batches
            fit = [(trial, name) for trial, name in fit
                   if _times_again(study, trial, name, base, batch, last=rounds == MORE_ROUNDS)]
    return batches


def _times_again(study: Study, trial: "Trial", name: str, base: str, batch: Batch | None, last: bool) -> bool:
    """Report a candidate's result to the study. Returns whether to time it again."""
    found = paired(ratios([batch], name, base)) if batch else None
    if found is None:
        study.finish(trial, None)
        return False
    if last:
        study.finish(trial, found.ratio)
        return False
    if study.report(trial, found.ratio, FIRST_ROUNDS):
        return True
    study.finish(trial, found.ratio, pruned=True)
    return False


def _storage(storage: str) -> "str | JournalStorage":
    """A database URL, or the journal in a file."""
    if "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(storage))
