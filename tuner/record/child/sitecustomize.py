"""Python imports this when it starts, from the first folder of PYTHONPATH: the recording begins, then the next one runs."""

import importlib
import importlib.util
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("_tune_kernels_record", _here / "__init__.py",
                                               submodule_search_locations=[str(_here)])
assert _spec is not None and _spec.loader is not None
_package = importlib.util.module_from_spec(_spec)
sys.modules["_tune_kernels_record"] = _package
_spec.loader.exec_module(_package)
importlib.import_module("_tune_kernels_record.begin").begin()

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]
_mine = sys.modules.pop("sitecustomize", None)
if (_next := importlib.util.find_spec("sitecustomize")) is not None and _next.loader is not None:
    _module = importlib.util.module_from_spec(_next)
    sys.modules["sitecustomize"] = _module
    _next.loader.exec_module(_module)
elif _mine is not None:
    sys.modules["sitecustomize"] = _mine
