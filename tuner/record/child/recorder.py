"""The kernels and launches of one process, told as events."""

import multiprocessing.util
from collections.abc import Callable, Sequence
from typing import Any

from .describe import argument, constant, function, layers
from .events import Events

MOST_LAUNCHES = 20_000  # distinct ones that are described per process; the last stands for all further ones
EXACT = 64  # launches of one kind that are counted at once; then at powers of 2 and at the end of the process


class Recorder:
    """The kernels and launches of one process. trial: a tuner tries configs; touched: told of each launch's arguments."""

    def __init__(self, events: Events, max_configs: int) -> None:
        self.events, self.max_configs = events, max_configs
        self.trial = False
        self.reads: dict[tuple[str, str], set[tuple[str, int]]] = {}
        self.numbers: dict[object, int] = {}
        self.counts: list[int] = []
        self.touched: Callable[[str, Sequence[Any]], None] = lambda kernel, arguments: None

    def compiled(self, source: Any, kernel: Any) -> None:
        """A kernel that was compiled or came from the cache."""
        metadata = kernel.metadata
        options = {name: value for name in ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion",
                                            "cluster_dims") if (value := getattr(metadata, name, None)) is not None}
        self.events.write("kernel", hash=kernel.hash, name=kernel.name, options=options, **function(source.fn),
                          **layers(source.fn), signature=[[name, str(kind)] for name, kind in source.signature.items()],
                          constants=[[list(path), constant(value)] for path, value in _constants(source)],
                          divisible=sorted(path[0] for path, attributes in _attributes(source)
                                           if any(a[0] == "tt.divisibility" for a in attributes)))

    def failed(self, source: Any, error: BaseException) -> None:
        """A kernel that could not be compiled. The program gets the error as it would without `record`."""
        self.events.write("failed", **function(source.fn), error=type(error).__name__, message=str(error)[-2000:],
                          signature=[[name, str(kind)] for name, kind in source.signature.items()], trial=self.trial)

    def launched(self, kernel: str, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """A launch. Equal ones are described once and counted."""
        described = [argument(value) for value in arguments]
        key = (kernel, grid, self.trial, repr(described))
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.counts) if len(self.counts) < MOST_LAUNCHES else MOST_LAUNCHES - 1
            if number == len(self.counts):
                self.counts.append(0)
                self.events.write("launch", number=number, kernel=kernel, grid=grid, arguments=described, trial=self.trial,
                                  reads=len(self.reads))
        self.counts[number] += 1
        count = self.counts[number]
        if 1 < count < EXACT or count & (count - 1) == 0:
            self.events.write("count", number=number, count=count)
        self.touched(kernel, arguments)

    def finish(self) -> None:
        """At the end of the process: the counts that are not written yet."""
        for number, count in enumerate(self.counts):
            if count >= EXACT:
                self.events.write("count", number=number, count=count)

    def forked(self) -> None:
        """In a process that was forked: it tells its own launches, in its own file."""
        self.numbers.clear()
        self.counts.clear()
        multiprocessing.util.Finalize(None, self.finish, exitpriority=0)

    def read_back(self, operation: str, where: str, origins: Sequence[tuple[str, int]]) -> None:
        """The program reads values that launches may have written. origins: kernel and index of the argument, per launch."""
        known = self.reads.setdefault((operation, where), set())
        if not known.issuperset(origins):
            known.update(origins)
            number = list(self.reads).index((operation, where))
            self.events.write("read", number=number, operation=operation, where=where, origins=origins)

    def configs(self, tuned: Any, total: int, kept: int) -> None:
        """A tuner is about to try `kept` of its `total` configs."""
        self.events.write("configs", function=tuned.__qualname__, module=tuned.__module__, total=total, kept=kept)


def _constants(source: Any) -> list[tuple[tuple[int, ...], Any]]:
    return sorted(((path if isinstance(path, tuple) else (source.fn.arg_names.index(path),)), value)
                  for path, value in source.constants.items()) if source.constants else []


def _attributes(source: Any) -> list[tuple[tuple[int, ...], list[Any]]]:
    return [(path, attributes) for path, attributes in (source.attrs or {}).items() if isinstance(path, tuple)]
