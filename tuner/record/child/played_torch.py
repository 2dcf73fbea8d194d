"""torch on a machine without a GPU, made to believe that it has one: `torch.cuda` answers, and tensors on "cuda" lie on the CPU.

Every CPU tensor says that it is on cuda:0: a program that puts a few tensors on the CPU sees no difference between the two.
Not covered: torch.compile, CUDA graphs, NCCL, libraries in C++ that call CUDA themselves, tensors made on "cuda" in a second
thread, and operations that torch has for CUDA alone.

Values that launches would have written are not there. A program that reads one back (`item`, `tolist`, `nonzero`, …) is caught
at it: the read and the launches that follow it are marked.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.library
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .played_cuda import answer

if TYPE_CHECKING:
    from .recorder import Recorder
    from .settings import Gpu

READS = ("_local_scalar_dense", "nonzero", "nonzero_static", "equal", "masked_select", "_unique2", "unique_consecutive",
         "unique_dim", "bincount", "repeat_interleave")  # operations whose result, or its shape, is a value of their input
FILLS = ("zero_", "fill_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_")  # nothing is left of what was there
NEW = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
MOST_ZEROED = 256 << 20  # bytes; larger memory stays as the system gives it
MOST_ORIGINS = 8  # per tensor

Origin = tuple[str, int]  # a kernel's hash, and the index of its argument


class Written:
    """The launches whose outputs a storage may hold."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, frozenset[Origin]]] = {}

    def of(self, tensors: Sequence[torch.Tensor]) -> frozenset[Origin]:
        found = frozenset[Origin]()
        for tensor in tensors:
            if (known := self.storages.get(tensor.untyped_storage()._cdata)) is not None:
                found |= known[1]
        return frozenset(sorted(found)[:MOST_ORIGINS])

    def put(self, tensor: torch.Tensor, origins: frozenset[Origin]) -> None:
        """A weak reference keeps the storage's address from being used again."""
        storage = tensor.untyped_storage()
        if origins:
            self.storages[storage._cdata] = (StorageWeakRef(storage), origins)
        else:
            self.storages.pop(storage._cdata, None)
        if len(self.storages) % 1000 == 999:
            self.storages = {key: known for key, known in self.storages.items() if not known[0].expired()}


class OnCpu(TorchDispatchMode):
    """Every operation of torch passes here: "cuda" becomes the CPU, and reads of a kernel's outputs are reported."""

    def __init__(self, recorder: "Recorder", written: Written) -> None:
        super().__init__()
        self.recorder, self.written = recorder, written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_on_cpu(value) for value in args)
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        name = func._schema.name.split("::")[-1]
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        if name == "record_stream":
            return None
        if not self.written.storages or name.startswith("empty"):
            return _zeroed(func(*args, **kwargs), name)
        origins = self.written.of(list(_tensors((args, list(kwargs.values())))))
        if origins and name in READS:
            self.recorder.read_back("item" if name == "_local_scalar_dense" else name.strip("_"), _caller(), sorted(origins))
        out = func(*args, **kwargs)
        out = _zeroed(out, name)
        fresh = name in FILLS or name.startswith("new_") or name.endswith("_like")
        for tensor in _tensors((out,)):
            if origins or fresh:
                self.written.put(tensor, frozenset() if fresh else origins)
        return out


def _zeroed(out: Any, name: str) -> Any:
    """New memory that a kernel would fill holds zeros: a run is the same each time."""
    if name in NEW and isinstance(out, torch.Tensor) and out.numel() * out.element_size() <= MOST_ZEROED:
        out.untyped_storage().fill_(0)
    return out


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _caller() -> str:
    """The innermost line of the program, past torch's own."""
    frame = sys._getframe(1)
    ours = __name__.rpartition(".")[0]
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "triton") and not module.startswith(ours):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def play(gpu: "Gpu", recorder: "Recorder") -> None:
    """Called when the program has imported torch."""
    written = Written()

    def touched(kernel: str, arguments: Sequence[Any]) -> None:
        for index, value in enumerate(arguments):
            base = getattr(value, "base", value)
            if isinstance(base, torch.Tensor):
                written.put(base, written.of([base]) | {(kernel, index)})

    recorder.touched = touched
    answer(gpu)
    cuda = torch.device("cuda", 0)
    device = torch.Tensor.device
    torch.Tensor.device = property(lambda self: cuda if device.__get__(self).type == "cpu" else device.__get__(self))
    torch.Tensor.is_cuda = property(lambda self: device.__get__(self).type == "cpu")
    torch.Tensor.is_cpu = property(lambda self: False)
    torch.Tensor.get_device = lambda self: 0
    torch.Tensor.to = _to_cpu(torch.Tensor.to)
    torch.compile = _compile
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _read_by(getattr(torch.Tensor, name), name, written, recorder))
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor")):
        setattr(owner, name, _made_on_cpu(getattr(owner, name)))
    mode = OnCpu(recorder, written)
    _register_for_cpu(mode)
    mode.__enter__()


def _compile(model: Any = None, **options: Any) -> Any:
    """torch.compile: the function as it is. It would make other kernels for a CPU."""
    return (lambda function: function) if model is None else model


def _made_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor that asks for its device before the mode sees it."""
    def made(*args: object, device: object = None, **kwargs: Any) -> Any:
        kind = torch.device("cpu" if device is None or isinstance(device, int) else device)
        return make(*args, device=_on_cpu(kind), **{**kwargs, **({"pin_memory": False} if "pin_memory" in kwargs else {})})

    return made


def _to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.to, which asks CUDA for the index of a device before the mode sees it."""
    def moved(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if args and isinstance(args[0], (str, int)) and not isinstance(args[0], bool):
            args = (torch.device(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), (str, int)):
            kwargs["device"] = torch.device(kwargs["device"])
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return moved


def _read_by(method: Callable[..., Any], name: str, written: Written, recorder: "Recorder") -> Callable[..., Any]:
    """A method that reads values without an operation of torch."""
    def read(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if origins := written.of([self]):
            recorder.read_back(name, _caller(), sorted(origins))
        return method(self, *args, **kwargs)

    return read


def _register_for_cpu(mode: OnCpu) -> None:
    """Operators that a program registers for CUDA in Python serve the CPU, and what they call passes the mode again."""
    register = torch.library.Library.impl

    def impl(self: Any, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any) -> Any:
        def inside(*args: object, **inner: object) -> Any:
            with mode:
                return fn(*args, **inner)

        key = dispatch_key or getattr(self, "dispatch_key", "")
        if key not in ("CUDA", "CPU", "CompositeExplicitAutograd"):
            return register(self, op_name, fn, dispatch_key, **kwargs)
        if key == "CUDA" and (self.ns == "aten" or not _has_cpu(self.ns, op_name)):
            key = "CPU"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an operator of torch's own is replaced, as the program asked
            return register(self, op_name, inside, key, **kwargs)

    torch.library.Library.impl = impl


def _has_cpu(namespace: str, operator: Any) -> bool:
    name = operator if isinstance(operator, str) else operator._schema.name
    full = name if "::" in name else f"{namespace}::{name}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"))
