"""Scripts as modules, for tests that run a part of one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """scripts/NAME.py, executed once; its neighbours are imported as they are when it runs."""
    if name not in sys.modules:
        sys.path.insert(0, str(SCRIPTS))
        try:
            spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
            assert spec and spec.loader
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(SCRIPTS))
    return sys.modules[name]
