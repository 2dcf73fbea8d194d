"""Shared by all tests. Kernels run on a GPU where there is one, else in Triton's interpreter (TRITON_INTERPRET=1, set by
run_tests.py: interpreting and compiling can't share a process)."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def device() -> str:
    torch = pytest.importorskip("torch", reason="launching kernels needs torch")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; the interpreter runs these tests with TRITON_INTERPRET=1")
    import interpreter_repair
    import interpreter_speed

    interpreter_repair.install()
    interpreter_speed.install()
    return "cpu"


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Promoted schedules that come with the project, or that the user has, have no say in tests."""
    from tune_kernels.schedules import store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SHIPPED", tmp_path_factory.mktemp("shipped"))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _new_memory_holds_nan() -> Iterator[None]:
    """Where kernels are interpreted: what nobody wrote shows at once, and not only where the allocator happens to return old
    memory."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tune_kernels.tuner.on_gpu.worker.operands import poisoned

    with poisoned():
        yield
