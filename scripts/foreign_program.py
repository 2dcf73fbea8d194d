#!/usr/bin/env python
"""The program that foreign_kernels.py records: calls a package's functions, each in a process of its own with a time limit.

    tune-kernels record --target sm_103 -- python scripts/foreign_program.py PACKAGE OUTCOMES FIRST END
"""

import json
import os
import signal
import sys
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any

import torch

CALLS = Path(__file__).with_name("foreign_calls.toml")
SECONDS = 240  # of one call, on a machine that may be busy


def calls_of(package: str) -> dict[str, str]:
    """Name and Python of each call."""
    calls: dict[str, str] = tomllib.loads(CALLS.read_text())[package]["calls"]
    return calls


def names() -> dict[str, Any]:
    """Those that calls use."""
    def r(*sizes: int, dtype: torch.dtype = torch.float32, grad: int = 0) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda").to(dtype).requires_grad_(bool(grad))

    def ids(size: Any, below: int) -> torch.Tensor:
        return torch.randint(0, below, size if isinstance(size, tuple) else (size,), device="cuda")

    def back(value: Any) -> None:
        outputs = [one for one in (value if isinstance(value, (tuple, list)) else [value])
                   if isinstance(one, torch.Tensor) and one.requires_grad]
        sum(one.float().sum() for one in outputs).backward()

    return {"torch": torch, "bf16": torch.bfloat16, "f16": torch.float16, "r": r, "ids": ids, "back": back,
            "e4m3": lambda *sizes: r(*sizes).to(torch.float8_e4m3fn),
            "linear": lambda n, k: torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)}


def call(name: str, text: str, given: dict[str, Any]) -> str:
    """Its outcome: ok, or the error's last line."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        outcome = "ok"
        try:
            exec(compile(text, name, "exec"), dict(given))
        except BaseException as e:
            traceback.print_exc()
            lines = str(e).strip().splitlines() or [""]
            outcome = f"{type(e).__name__}: {lines[0][:200]}"
        os.write(write, outcome.encode())
        os._exit(0)
    os.close(write)
    ended = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"not finished after {SECONDS} s"
        time.sleep(0.02)
    told = os.read(read, 4096).decode(errors="replace")
    os.close(read)
    return told or "the process died"


def main() -> None:
    package, outcomes, first, end = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    table = tomllib.loads(CALLS.read_text())[package]
    torch.set_num_threads(1)
    given = names()
    exec(table["import"], given)
    with open(outcomes, "w", encoding="utf-8") as file:
        for name, text in list(calls_of(package).items())[first:end]:
            outcome = call(name, text, given)
            file.write(json.dumps({"call": name, "outcome": outcome}) + "\n")
            file.flush()
            print(f"{package} {name}: {outcome}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
