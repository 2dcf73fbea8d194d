"""The full model for the gate, on a tiny model of the torch backend: what is asked of the decoder is what it has."""

import pytest

torch = pytest.importorskip("torch")

from tune_kernels.decoder import Decoder  # noqa: E402
from tune_kernels.schedules.schedule import LinearSchedule  # noqa: E402
from tune_kernels.shapes.model import ModelShape  # noqa: E402
from tune_kernels.tuner.on_gpu.worker import probe  # noqa: E402
from tune_kernels.tuner.on_gpu.worker.probe import GpuProbe, Loaded, ProbeTask, prompt_of, times_of, tokens_of  # noqa: E402
from tune_kernels.tuner.pool import Died  # noqa: E402

TINY = ModelShape("tiny", "llama", 32, 64, 2, 2, 1, 16, 300, 10000.0, 1e-5, False, False, 512, "tests")
SCHEDULE = LinearSchedule(64, 128, 3, 4)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    for name, value in (("PROMPT_LENGTHS", (5, 18)), ("NEW_TOKENS", 12), ("TIMED_PROMPT", 6), ("TIMED_TOKENS", 10)):
        monkeypatch.setattr(probe, name, value)
    return Decoder.load("random:0", model=TINY, recipe="fp32", backend="torch")


def test_all_modes_emit_the_same_tokens_with_a_scripted_drafter(decoder: Decoder) -> None:
    found = tokens_of(decoder)
    assert [len(t) for t in found["ar"]] == [12, 12]
    assert found["ar"] == found["sd"] == found["ssd"]


def test_old_and_new_are_timed_in_pairs(decoder: Decoder) -> None:
    found = times_of(decoder, Decoder.load("random:0", model=TINY, recipe="fp32", backend="torch"), 3)
    assert set(found) == {"ar", "sd"}
    for pairs in found.values():
        assert len(pairs) == 3
        assert all(a > 0 and b > 0 for a, b in pairs)


def test_prompts_are_a_tokenizers_ids() -> None:
    assert prompt_of(9, 300) == prompt_of(9, 300)
    assert all(probe.FIRST_ID <= t < 300 for t in prompt_of(100, 300))


class Worker:
    """Answers with what it was asked."""

    words = "words"

    def __init__(self, dies: bool = False) -> None:
        self.asked: list[ProbeTask] = []
        self.dies = dies

    def ask(self, function: object, task: ProbeTask, wall_seconds: float) -> object:
        self.asked.append(task)
        return Died(False, "the worker died: SIGSEGV") if self.dies else {"ar": [[1]]}

    def words_of(self, died: Died) -> str:
        return died.detail


def test_the_same_schedules_are_asked_once_and_only_the_decoders_kernels() -> None:
    worker = Worker()
    gpu = GpuProbe(worker, "bundle", Loaded("tiny", "random:0", "fp8-v1"))  # type: ignore[arg-type]
    for _ in range(2):
        gpu.tokens({"lm_head_logits": SCHEDULE, "down": SCHEDULE})
    [task] = worker.asked
    assert task.old == (("down", SCHEDULE),)
    gpu.time_step({"down": SCHEDULE}, {"o": SCHEDULE}, 5)
    assert (worker.asked[1].new, worker.asked[1].repeats) == ((("o", SCHEDULE),), 5)


def test_a_decoder_that_dies_is_a_users_error() -> None:
    from tune_kernels.tuner.errors import GpuError

    gpu = GpuProbe(Worker(dies=True), "bundle", Loaded("tiny", "random:0", "fp8-v1"))  # type: ignore[arg-type]
    with pytest.raises(GpuError, match="SIGSEGV"):
        gpu.tokens({"down": SCHEDULE})
