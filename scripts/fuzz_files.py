"""Runs the commands on mutated files of every kind they read: each run must end with exit code 0, 1 or 2 and a message, without a
traceback or files outside the given folders, in bounded time and memory. Prints a table, the faults by place, and one JSON line.
A short seeded run is a test (tests/tuner/review/test_fuzz_files.py).

One mutation drops a field, gives it another type, makes it huge, negative, NaN or deep, repeats its name, or puts markup, escape
codes, surrogates or path tricks into it; or it cuts the file, or changes a byte.
"""

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.table import Table
from tune_kernels.schedules import store
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner import cli

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "tests" / "data" / "recordings" / "h200-smollm2-135m.json"
STORE = "nvidia-h200/smollm2-135m.fp8-v1.json"
CPU_SECONDS = 20  # of one file; the slowest whole one takes about 2
SECONDS = 200  # of one file by the wall clock, which a loaded machine stretches
GROWTH_BYTES = 1 << 30  # of one file
RAW = "@raw@"  # begins a text that stands in the file without its quotes
TEXTS = ["", "[/b]", "[red]x[/usr/lib/x]", "<script>alert(1)</script>", "\x1b[31m\x07", "../../up", "/etc/passwd", "a\0b",
         "{{ 7*7 }}", "x" * 100_000, "\u202eabc", "nan", "..", "con.", "%s%n", "'; --", "a/b", "~", "\n# t", "\ud800"]
NUMBERS = ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "1" + "0" * 5000, "-1", "0", "1e-300", "9007199254740993",
           "-0.0", "2.5"]
OTHERS: list[object] = [None, True, False, [], {}, [[]], [None], {"": 1}, 0, 1, "text"]


def mutated(value: object, rng: random.Random) -> object:
    """The value with one place changed."""
    places = list(_places(value))
    if not places:
        return value
    table, key = rng.choice(places)
    kind = rng.choice(["drop", "text", "number", "other", "deep", "twice", "add"])
    if kind == "drop":
        del table[key]  # type: ignore[attr-defined]
    elif kind == "twice" and isinstance(table, dict):
        table[f"{RAW}{key}"] = rng.choice([table[key], *OTHERS])
    elif kind == "add" and isinstance(table, dict):
        table[rng.choice(TEXTS)] = rng.choice(OTHERS)
    else:
        new = {"text": rng.choice(TEXTS), "number": RAW + rng.choice(NUMBERS), "other": rng.choice(OTHERS),
               "deep": RAW + "[" * 2000 + "]" * 2000}
        table[key] = new.get(kind, RAW + "[" * 40 + "]" * 40)  # type: ignore[index]
    return value


def _places(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def as_json(value: object) -> bytes:
    text = json.dumps(value, indent=1)
    for raw in (*NUMBERS, "[" * 2000 + "]" * 2000, "[" * 40 + "]" * 40):
        text = text.replace(json.dumps(RAW + raw), raw)
    return text.replace(f'"{RAW}', '"').encode()


def as_toml(value: object) -> bytes:
    """A document whose tables are inline."""
    assert isinstance(value, dict)
    text = "\n".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items() if v is not None)
    return text.replace("NaN", "nan").replace("Infinity", "inf").replace(f'"{RAW}', '"').encode("utf-8", "surrogatepass")


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(v) for v in value if v is not None) + "]"
    return value.removeprefix(RAW) if isinstance(value, str) and value.startswith(RAW) else json.dumps(value)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, or with a byte changed."""
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(1) + data[at + 1:]


@dataclass(frozen=True)
class Kind:
    """One kind of file. path: inside the folder of a run; parse, write: its value and its bytes; run: read it, as a command does;
    returns the exit code."""

    name: str
    path: str
    parse: Callable[[bytes], object]
    write: Callable[[object], bytes]
    run: Callable[[Path], int]


def command(*arguments: str) -> int:
    """The command line, in this process."""
    before, sys.argv = sys.argv, ["tune-kernels", *arguments]
    try:
        cli.main()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    finally:
        sys.argv = before
    return 0


def call(work: Callable[[], object]) -> int:
    """A reader that no quick command has, with the command line's treatment of errors."""
    try:
        work()
    except UserError as e:
        click.echo(f"error: {e}", err=True)
        return e.exit_code
    return 0


def read_space(folder: Path) -> int:
    from tune_kernels.tuner.offline.space import load_space, schedules

    def work() -> None:
        space = load_space(str(folder / "space.toml"))
        for kernel in space.grids[0].kernels if space.grids else ():
            schedules(space, kernel, "sm_90")

    return call(work)


def read_checkpoint(folder: Path) -> int:
    import torch
    from tune_kernels.decoder.checkpoint.loader import load_checkpoint

    return call(lambda: load_checkpoint(str(folder / "checkpoint"), None, torch.device("cpu")))


def parse_safetensors(data: bytes) -> object:
    size = struct.unpack("<Q", data[:8])[0]
    return {"header": json.loads(data[8:8 + size]), "tail": data[8 + size:].hex()}


def write_safetensors(value: object) -> bytes:
    table = value if isinstance(value, dict) else {}
    header = as_json(table.get("header"))
    tail = table.get("tail")
    hexadecimal = isinstance(tail, str) and re.fullmatch("([0-9a-f]{2})*", tail)
    return struct.pack("<Q", len(header)) + header + (bytes.fromhex(str(tail)) if hexadecimal else b"")


DIFF = ("diff", "--json")
KEY = store.key_of(store.read(ROOT / "schedules" / STORE).rows[0])
KINDS = (
    Kind("schedules", f"schedules/{STORE}", json.loads, as_json,
         lambda at: command(*DIFF, "--check", str(at.parent / "whole" / "schedules"), str(at / "schedules"))),
    Kind("look-up", f"schedules/{STORE}", json.loads, as_json, lambda at: call(lambda: store.lookup(KEY, [at / "schedules"]))),
    Kind("reports", "bundle/report.json", json.loads, as_json,
         lambda at: command(*DIFF, str(at.parent / "whole" / "bundle"), str(at / "bundle"))),
    Kind("shown reports", "bundle/report.json", json.loads, as_json,
         lambda at: command("show", _accepted(at.parent / "whole"), "--no-sass", "--out", str(at / "bundle"))),
    Kind("bundles", "bundle/ARTEFACT/sha256.json", json.loads, as_json,
         lambda at: command("show", _accepted(at.parent / "whole"), "--no-sass", "--out", str(at / "bundle"))),
    Kind("recordings", "recording.json", json.loads, as_json,
         lambda at: command("--on-gpu", "--replay", str(at / "recording.json"), "--dry-run", "--json", "--out", str(at / "out"),
                            "--schedules", str(at / "schedules"))),
    Kind("configs", "model/config.json", json.loads, as_json,
         lambda at: command("roofline", "--json", "--model", str(at / "model"))),
    Kind("shapes", "shape.toml", lambda data: tomllib.loads(data.decode()), as_toml,
         lambda at: command("roofline", "--json", "--model", str(at / "shape.toml"))),
    Kind("spaces", "space.toml", lambda data: tomllib.loads(data.decode()), as_toml, read_space),
    Kind("checkpoints", "checkpoint/config.json", json.loads, as_json, read_checkpoint),
    Kind("tensor headers", "checkpoint/model.safetensors", parse_safetensors, write_safetensors, read_checkpoint),
)


def _accepted(whole: Path, field: str = "id") -> str:
    """Of the variant whose bundle is mutated."""
    report = json.loads((whole / "bundle" / "report.json").read_text())
    return str(next(v[field] for v in report["variants"] if v["verdict"] == "accepted"))


def make_whole(folder: Path) -> None:
    """A right file of each kind."""
    from safetensors.torch import save_file
    from tune_kernels.decoder.checkpoint.loader import load_checkpoint

    (folder / "schedules" / STORE).parent.mkdir(parents=True)
    shutil.copy(ROOT / "schedules" / STORE, folder / "schedules" / STORE)
    shutil.copy(RECORDING, folder / "recording.json")
    shutil.copy(ROOT / "shapes" / "smollm2-135m.toml", folder / "shape.toml")
    (folder / "space.toml").write_text('[[grid]]\nkernels = ["merge"]\nBLOCK_D = [32, 64]\nsplits = [1]\nnum_warps = [1]\n')
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 61,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
              "eos_token_id": 0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}
    for name in ("model", "checkpoint"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    import torch

    made = load_checkpoint("random:0", str(folder / "model" / "config.json"), torch.device("cpu"))
    save_file({name: tensor.contiguous() for name, tensor in made.tensors.items()}, folder / "checkpoint" / "model.safetensors")
    code = command("--offline", "--json", "--model", "smollm2-135m", "--kernel", "merge", "--target", "sm_90", "--jobs", "1",
                   "--space", str(folder / "space.toml"), "--out", str(folder / "bundle"), "--schedules", str(folder / "none"))
    assert code == 0, "the sweep of the whole bundle failed"


PATHS = (str, bytes, os.PathLike)


class Watch:
    """Every path that this process opens for writing, makes, renames or removes, by Python's audit events."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.paths is None:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.paths.append(str(arguments[0]))
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink"):
            folders = [f"/proc/self/fd/{a}" for a in arguments[1:] if isinstance(a, int) and a >= 0 and event != "os.mkdir"]
            base = os.readlink(folders[0]) if folders else ""
            self.paths += [os.path.join(base, a) for a in map(os.fsdecode, (a for a in arguments[:2] if isinstance(a, PATHS)))]


@dataclass
class Tally:
    """The outcomes of the files of one kind."""

    exits: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def by_group(self) -> dict[str, int]:
        """The faults by what went wrong."""
        groups = {name: sum(n for fault, n in self.faults.items() if fault.startswith(begin))
                  for name, begin in (("tracebacks", "traceback"), ("hangs", "hang"), ("outside", "outside"))}
        return groups | {"others": self.faults.total() - sum(groups.values())}


class TooSlow(BaseException):
    """The alarm; no handler of the product's catches it."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _set_alarms(cpu_seconds: float, seconds: float) -> None:
    """0: none."""
    signal.signal(signal.SIGPROF, _alarm)
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def run_one(kind: Kind, at: Path, tally: Tally, watch: Watch) -> str | None:
    """Read one file; the fault, if there is one."""
    said, errors = io.StringIO(), io.StringIO()
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fault, code = None, -1
    _set_alarms(CPU_SECONDS, SECONDS)
    watch.paths = []
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            code = kind.run(at)
    except TooSlow:
        fault = f"hang: more than {CPU_SECONDS} s of CPU time, or {SECONDS} s"
    except Exception as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if not re.search("site-packages|lib/python", f.filename)]
        fault = f"traceback: {type(e).__name__} at {'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}"
    finally:
        _set_alarms(0, 0)
        written, watch.paths = watch.paths or [], None
    tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
    tally.exits[code] += 1
    allowed = (str(at), os.devnull)
    outside = [p for p in written if not os.path.abspath(p).startswith(allowed) and not p.isdigit()]
    if fault is None and outside:
        fault = f"outside: {outside[0]}"
    if fault is None and code not in (0, 1, 2):
        fault = f"exit {code}"
    if fault is None and code and not errors.getvalue().strip():
        fault = f"exit {code} without a message"
    if fault is None and "\x1b" in said.getvalue() + errors.getvalue():
        fault = "an escape code reached the terminal"
    if fault is None and (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 > GROWTH_BYTES:
        fault = f"memory: more than {GROWTH_BYTES >> 20} MiB"
    return fault


def fuzz(kinds: tuple[Kind, ...], seed: int, count: int, keep: Path | None = None) -> dict[str, Tally]:
    """`count` mutated files of each kind. keep: a folder for the first file of each fault."""
    found = {kind.name: Tally() for kind in kinds}
    watch, rng = Watch(), random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "whole")
        with contextlib.redirect_stdout(io.StringIO()):
            make_whole(whole)
        for kind in kinds:
            at, tally = Path(name, "run"), found[kind.name]
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(whole, at)
            (at / "tmp").mkdir()
            tempfile.tempdir = str(at / "tmp")
            path = kind.path.replace("ARTEFACT", f"artefacts/{_accepted(whole, 'artefact')}")
            right = (whole / path).read_bytes()
            for i in range(count + 1):  # the first is the right one: it must be read
                data = right
                while i and data == right:
                    data = damaged(right, rng) if rng.random() < 0.1 else kind.write(mutated(kind.parse(right), rng))
                (at / path).write_bytes(data)
                fault = run_one(kind, at, tally, watch)
                if not i and tally.exits[0] != 1:
                    raise click.ClickException(f"the right file of {kind.name} isn't read: {fault or tally.exits}")
                if fault:
                    if keep and not tally.faults[fault]:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{kind.name.replace(' ', '-')}-{len(tally.faults)}{Path(path).suffix}").write_bytes(data)
                    tally.faults[fault] += 1
    tempfile.tempdir = None
    return found


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--count", default=1000, show_default=True, help="Mutated files of each kind.")
@click.option("--kind", "names", multiple=True, type=click.Choice([k.name for k in KINDS]), help="Repeatable.  [default: all]")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the first file of each fault there.")
def main(seed: int, count: int, names: tuple[str, ...], keep: Path | None) -> None:
    """Exit code 1 where a file led to a fault."""
    began = time.monotonic()
    found = fuzz(tuple(k for k in KINDS if not names or k.name in names), seed, count, keep)
    table = Table("kind", "files", "exit 0", "exit 1", "exit 2", "tracebacks", "hangs", "outside", "others", "slowest s")
    for name, tally in found.items():
        table.add_row(name, *map(str, (sum(tally.exits.values()), *(tally.exits[c] for c in (0, 1, 2)),
                                       *tally.by_group().values(), f"{tally.slowest_s:.1f}")))
    console = Console(width=130)
    console.print(table)
    for name, tally in found.items():
        for fault, n in tally.faults.most_common():
            console.print(f"{name}: {n}  {fault}", markup=False, highlight=False, soft_wrap=True)
    counts = Counter(mutated=count * len(found), **dict.fromkeys(found, count))
    for tally in found.values():
        counts.update(tally.by_group())
    faults = [f"{name}: {n} x {fault}" for name, tally in found.items() for fault, n in tally.faults.items()]
    print(json.dumps({"seed": seed, "counts": counts, "faults": faults,
                      "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
