#!/usr/bin/env python
"""Writes docs/figures.md from the committed records, so that no figure is typed by hand.

    python scripts/figures.py            # write the page
    python scripts/figures.py --check    # exit 1 where the page is not what the records give
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures.md"
RECORDINGS = ROOT / "tests" / "data" / "recordings"


def read(name: str) -> dict[str, Any]:
    """A record below docs/."""
    table: dict[str, Any] = json.loads((ROOT / "docs" / name).read_text())
    return table


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; numbers stand to the right of the first column."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def decode() -> str:
    """AR, SD and SSD of Qwen2.5-7B's shape on an H200."""
    r = read("benchmarks/h200-qwen2.5-7b-decode.json")
    k, runs = r["draft_length"], [("AR", r["decode"]["ar"]), (f"SD, K = {r['draft_length']}", r["decode"]["sd"])]
    for where, found in (("the same GPU", r["decode"]), ("a second GPU", r.get("two_gpus") or {})):
        runs += [(f"SSD, K = {k}, drafter on {where}, {100 * found[mode]['hit_rate']:.0f}% of branches hit", found[mode])
                 for mode in ("ssd", "ssd_misses") if mode in found]
    rates = markdown(["mode", "tokens/s", "with the prompt", "tokens per round", "round, us"],
                     [[name, f"{run['tokens_per_s']:.0f}", f"{run['tokens_per_s_with_prefill']:.0f}", f"{run['tokens_per_round']:.2f}",
                       f"{run['round_us']:.0f}"] for name, run in runs])
    ar = r["decode"]["ar"]
    rest = markdown(["", ""], [
        ["floor of a step: its bytes at the read ceiling", f"{r['floor_us']:.0f} us, {1e6 / r['floor_us']:.0f} tokens/s"],
        ["AR step over that floor", f"{ar['round_us'] / r['floor_us']:.2f}"],
        [f"verification of {k + 1} rows over one row", f"{r['verify_over_ar']:.3f}"],
        ["launches per pass", str(r["launches_per_pass"])],
        ["AR without CUDA graphs", f"{r['no_graphs']['tokens_per_s']:.0f} tokens/s, the same tokens"],
        *([f"first token, prompt of {f['prompt']}", f"{f['ms']:.1f} ms, {100 * f['roofline_share']:.0f}% of the roofline"]
          for f in r["first_token"])])
    linears = markdown(["linear", "us", "share of the read ceiling", "`torch._scaled_mm` over it", "the same, with the kernel that reads it"],
                       [[f"{x['kernel']} {x['N']} x {x['K']}", f"{x['time_us']:.1f}", f"{x['ceiling_share']:.2f}",
                         f"{x['over_scaled_mm']:.2f}", f"{x['over_scaled_mm_with_reader']:.2f}"] for x in r["linears"]])
    parts = "\n\n".join(f"A pass of {rows} row{'s' if rows != '1' else ''}, by kind of kernel:\n\n" + markdown(
        ["kind", "launches", "us each, alone", "share of the pass", "us each in the pass", "TB/s"],
        [[x["kind"], str(x["launches"]), f"{x['time_us'] / x['launches']:.2f}", f"{100 * x['share']:.1f}%",
          f"{x['adds_us'] / x['launches']:.2f}", f"{x['bandwidth_tb_s']:.2f}"] for x in kinds])
        for rows, kinds in r["profile"].items())
    return f"""## Decoding on the GPU

`python scripts/bench_decode.py`: {r['gpu']} (driver {r['driver']}, torch {r['torch']}, Triton {r['triton']}), {r['model']} with random weights,
FP8 projections and a bf16 head, one request, {r['new_tokens']} tokens after a prompt of {r['prompt']}, medians of {r['repeats']}. Reads measured
in the same run: {r['read_ceiling_tb_s']:.2f} TB/s. All schedules are promoted ones. Acceptance is scripted: an FP8 EAGLE-3 drafter of random
weights does all its work, and its proposals are overwritten. Rows with a second GPU: two of them on NVLink.
[Record](benchmarks/h200-qwen2.5-7b-decode.json).

{rates}

{rest}

{linears}

"The kernel that reads it" sums the partials or applies SwiGLU. "In the pass" is the pass less the pass without that kind: kinds overlap, so
the sum is less than the pass.

{parts}
"""


def promotion() -> str:
    """What --on-gpu found and promoted, from the recordings of its runs."""
    rows = []
    for path in sorted(RECORDINGS.glob("h200-*.json")):
        r = json.loads(path.read_text())
        checked = [found for contest in r["contests"].values() for found in contest["checked"].values()]
        gate = r["gate"]
        rows.append([r["model"], f"{sum(found['failure'] is None for found in checked)} of {len(checked)}", f"{r['gpu_seconds']:.0f} s",
                     f"{r['seconds_to_first_sample']:.0f} s", f"{r['calls']['compiler']}, {r['calls']['ptxas']}",
                     ", ".join(gate["rejected"]) or "none"])
    head = ["model", "candidates right, row-invariant, deterministic", "GPU time", "first sample", "calls of the compiler, of ptxas",
            "winners refused by the full model"]
    return f"""## Promotion

`tune-kernels --on-gpu` on one {r['machine']['gpu']} (driver {r['machine']['driver']}, Triton {r['toolchain']['triton']}), from bundles made without a
GPU, with random weights. The [recordings](../tests/data/recordings) rank again without a GPU:
`tune-kernels --on-gpu --replay tests/data/recordings/h200-qwen2.5-7b.json --dry-run`.

{markdown(head, rows)}
"""


def checks() -> str:
    """The three checks on SmolLM2."""
    rows = []
    for where, prefix in (("torch, CPU", "decoder-smollm2"), ("triton, H200", "h200-decoder-smollm2")):
        for recipe in ("fp32", "bf16", "fp8-v1"):
            path = ROOT / "docs" / "evidence" / f"{prefix}-{recipe}.json"
            if path.exists():
                counts = json.loads(path.read_text())["checks"]
                rows.append([where, recipe, *(f"{counts[kind]['passed']} of {counts[kind]['run']}"
                                              for kind in ("agreement", "reference", "quality"))])
    return f"""## The three checks on SmolLM2-135M-Instruct

`tune-kernels verify`; records are `docs/evidence/decoder-smollm2-RECIPE.json` and `docs/evidence/h200-decoder-smollm2-RECIPE.json`.

{markdown(["backend", "recipe", "agreement", "reference", "quality"], rows)}
"""


def accumulation() -> str:
    """Error and time of the distance after which FP8 products are promoted to fp32."""
    r = read("evidence/h200-accumulation-error.json")
    rows = [[x["kernel"], f"{x['K']}", "never" if not x["every"] else f"every {x['every']}", f"{x['rms_error']:.1e}",
             f"{1000 * x['ms']:.1f}", "the recipe's" if x["recipe"] else ""] for x in r["rows"]]
    return f"""## Promotion of FP8 products to fp32

`python scripts/accumulation_error.py`, {r['gpu']} (driver {r['driver']}, torch {r['torch']}, Triton {r['triton']}); the recipe's limit is
{r['limit']:.0e}. [Record](evidence/h200-accumulation-error.json).

{markdown(["kernel", "K", "promoted", "relative RMS error", "us", ""], rows)}
"""


def offline() -> str:
    """The offline sweep on two cores."""
    r = read("evidence/bench-offline-sm_103.json")
    rows = [["the whole default space, cold", f"{r['variants']} variants, {r['inspected']} of them to a cubin, in {r['default_space_cold_s']:.1f} s"],
            ["the same again", f"{r['second_run_compiled']} compiled, {r['second_run_s']:.2f} s"],
            ["variants that reach a cubin and are inspected", f"{r['inspected_per_s']:.1f} a second"],
            ["two workers over one", f"{r['two_workers_over_one']:.2f} times"],
            ["over a plain loop of `triton.compile`, `cuobjdump`, `nvdisasm` (same verdicts)", f"{r['over_plain_loop']:.2f} times"],
            ["all variants over half of them", f"{r['whole_over_half']:.2f} times the time"],
            ["`tune-kernels --help`", f"{r['help_s']:.3f} s"]]
    return f"""## Offline

`python scripts/bench_offline.py`: {r['cores']} cores ({r['machine']}), Python {r['python']}, Triton {r['triton']}, {r['target']}, everything cold.
[Record](evidence/bench-offline-sm_103.json).

{markdown(["", ""], rows)}
"""


def bundle() -> str:
    """Artefacts made without a GPU, launched on one."""
    r = read("evidence/h200-bundle-check.json")
    return f"""## A bundle made elsewhere

`python scripts/check_bundle.py`, {r['gpu']} (driver {r['driver']}, torch {r['torch']}, Triton {r['triton']}): {r['ok']} of {r['variants']} accepted
variants launched from a bundle made on a machine without a GPU, {r['compiled']} compiled, each right against fp64, rows 1 to 9 bit-identical alone
and among others. Measured on an earlier version of the kernels. [Record](evidence/h200-bundle-check.json).
"""


def page() -> str:
    """The whole page."""
    head = "# Figures\n\nWritten by `python scripts/figures.py` from the records that scripts left under `docs/`. Times are ratios within one run on\n" \
           "one GPU; absolute times name their machine. B200 and B300 are proven by artefacts alone: none was at hand.\n"
    return "\n".join([head, decode(), promotion(), checks(), accumulation(), offline(), bundle()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is out of date")
    options = parser.parse_args()
    text = page()
    if options.check:
        if PAGE.read_text() != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the records give: run python scripts/figures.py")
            return 1
        return 0
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
