"""CUDA graphs of passes: one replay in place of hundreds of launches."""

import contextlib
import threading
from collections.abc import Callable, Hashable

import torch

EAGER_RUNS = 2  # runs before a capture: they load the kernels, and a pass that is used once costs no capture
WARM_UP = EAGER_RUNS + 1  # runs until a pass is only replayed: the last of them captures it
ONE_AT_A_TIME = threading.Lock()  # CUDA refuses a synchronisation with a GPU while another thread captures on it

WARM, TIMED = 2, 10  # replays of `seconds`


class Graphs:
    """Graphs of passes, by key. enabled: False launches every pass eagerly, as on a CPU. A pass must read and write fixed
    addresses only."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.device = device
        self.runs: dict[Hashable, int] = {}
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.stream: torch.cuda.Stream | None = None

    def run(self, key: Hashable, launches: Callable[[], None]) -> None:
        """Replays the pass if it is captured; captures it after EAGER_RUNS runs; until then launches it."""
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
        elif self.enabled and self.runs.get(key, 0) >= EAGER_RUNS:
            self.graphs[key] = self.capture(launches)
            self.graphs[key].replay()
        else:
            self.runs[key] = self.runs.get(key, 0) + 1
            with on(self.device):
                launches()

    def lacks(self, key: Hashable) -> bool:
        """Whether a pass isn't captured yet, and will be."""
        return self.enabled and key not in self.graphs

    def prepare(self, key: Hashable, launches: Callable[[], None]) -> None:
        """Captures a pass before its first use, after one run that loads its kernels."""
        if self.lacks(key):
            with on(self.device):
                launches()
            self.graphs[key] = self.capture(launches)

    def seconds(self, key: Hashable) -> float:
        """The time of a captured pass: of TIMED replays in a row, after WARM."""
        graph = self.graphs[key]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with on(self.device):
            for count in range(WARM + TIMED):
                if count == WARM:
                    start.record()
                graph.replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / TIMED / 1e3

    def capture(self, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures the launches as a graph. They must have run once: a capture can't compile or load a kernel. The stream is this
        object's own, since a drafter's thread may capture as well, for another GPU."""
        with ONE_AT_A_TIME, on(self.device):
            self.stream = self.stream or torch.cuda.Stream(self.device)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                launches()
        return graph


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context whose launches go to this GPU; it does nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
