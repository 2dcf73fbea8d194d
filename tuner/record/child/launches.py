"""Records what Triton compiles and launches, by wrapping its compiler and its driver's launcher. Triton 3.6 to 3.9."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recorder import Recorder
    from .settings import Gpu


def record_launches(gpu: "Gpu | None", recorder: "Recorder") -> None:
    """Called when the program has imported triton. gpu: the one to play, or None for the real one."""
    import triton
    import triton.compiler
    from triton.runtime import driver

    from . import played_driver

    recorder.events.write("triton", version=triton.__version__)
    compile_ = triton.compiler.compile

    def compile_and_record(src: Any, *args: object, **kwargs: object) -> Any:
        if gpu is None:
            watch(driver.active, recorder)
        try:
            kernel = compile_(src, *args, **kwargs)
        except BaseException as e:
            if hasattr(src, "fn"):
                recorder.failed(src, e)
            raise
        if hasattr(src, "fn"):
            recorder.compiled(src, kernel)
        return kernel

    triton.compiler.compile = compile_and_record
    played_driver.mark_trials(recorder, played=gpu is not None)
    if gpu is not None:
        driver.set_active(played_driver.Driver(gpu, recorder))


def watch(real: Any, recorder: "Recorder") -> None:
    """Records each launch on the real GPU, then does it. Changes the driver once."""
    inner = real.launcher_cls
    if getattr(inner, "recorded", False):
        return

    class Launcher:
        recorded = True

        def __init__(self, src: Any, metadata: Any) -> None:
            self.inner, self.hash = inner(src, metadata), metadata.hash

        def __call__(self, x: int, y: int, z: int, stream: object, function: object, packed: object, launch_metadata: object,
                     enter: object, leave: object, *arguments: Any) -> Any:
            recorder.launched(self.hash, (x, y, z), arguments)
            return self.inner(x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    real.launcher_cls = Launcher
