"""Shared by the scripts: `--help` from the module's docstring, the closing JSON line, the exit code."""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tune_kernels.shapes.errors import UserError

if TYPE_CHECKING:
    from tune_kernels.decoder.bench.bench import Prompt

ROOT = Path(__file__).resolve().parents[1]


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The unformatted docstring, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default is not None and action.default is not False else action.help


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with the option --out."""
    made = argparse.ArgumentParser(description=docstring, formatter_class=_Help)
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON to this file")
    return made


def publish(record: Mapping[str, object], out: Path | None) -> None:
    """Prints a record as one JSON line, and writes it to `out` if given."""
    line = json.dumps(record, sort_keys=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    print(line)


def cpu_model() -> str:
    """The CPU's name in /proc/cpuinfo; platform.processor() on other systems."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


def evaluation_prompts() -> "tuple[Prompt, ...]":
    """The six prompts of `bench`."""
    from tune_kernels.decoder.bench.bench import load_prompts

    return load_prompts(ROOT / "decoder" / "checks" / "data" / "prompts.toml", "evaluation")[0]


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main's exit code. A user's error is one line on stderr."""
    try:
        sys.exit(main())
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")
