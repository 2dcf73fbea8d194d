"""Starts the recording in a process of the program."""

import atexit
import json
import os
import sys
from pathlib import Path

from .events import Events
from .imports import after
from .launches import record_launches
from .recorder import Recorder
from .settings import VARIABLE, Gpu, Settings


def begin() -> None:
    """Watches the program's imports of triton and torch, if this process is recorded."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    fields = json.loads(text)
    gpu = Gpu(**fields.pop("gpu")) if fields.get("gpu") else None
    settings = Settings(gpu=gpu, **{name: fields[name] for name in ("folder", "max_configs")})
    recorder = Recorder(Events(Path(settings.folder)), settings.max_configs)
    recorder.events.write("process", executable=sys.executable, arguments=sys.argv)
    atexit.register(recorder.finish)
    os.register_at_fork(after_in_child=recorder.forked)
    after("triton", lambda: record_launches(gpu, recorder))
    if gpu is not None:
        def torch_imported() -> None:
            from .played_torch import play

            play(gpu, recorder)

        after("torch", torch_imported)
