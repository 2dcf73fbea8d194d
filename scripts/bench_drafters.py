"""Real drafters on the evaluation prompts, in one JSON: AR, SD at K = 1 to 8 and at draft_length="auto", SSD; n-gram look-up and
the drafter that ships for the model. Runs of one drafter are interleaved; every output is compared with AR's.

    python scripts/bench_drafters.py --weights smollm2 --recipe fp8-v1 --out build/drafters.json

The table goes to standard output, then one JSON line. Exit code 1 if any output differs from AR's.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.bench import bench
from tune_kernels.decoder.commands.bench import show
from tune_kernels.decoder.commands.options import DATA
from tune_kernels.decoder.draft_length import AUTO
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.shapes.files import replace_text


@click.command()
@click.option("--weights", default="smollm2", show_default=True)
@click.option("--recipe", default="fp32", show_default=True)
@click.option("--longest", type=click.IntRange(1, 8), default=8, show_default=True, help="Largest fixed K.")
@click.option("--ssd", type=click.IntRange(1, 8), multiple=True, default=(4,), show_default=True, help="SSD's K.")
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("--prompts", "count", type=click.IntRange(1), default=6, show_default=True, help="Of the evaluation prompts.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(weights: str, recipe: str, longest: int, ssd: tuple[int, ...], repeats: int, max_new_tokens: int, count: int,
         out: Path) -> None:
    decoder = Decoder.load(weights, recipe=recipe, drafter="auto", allow_untuned=True)
    trained = decoder.drafter
    found: dict[str, Any] = {}
    prompts = bench.load_prompts(DATA / "prompts.toml", "evaluation")[0][:count]
    lengths: tuple[int | str, ...] = (*range(1, longest + 1), AUTO)
    for drafter in (NGramDrafter(), trained):
        if drafter is None or drafter.name in found:
            continue
        decoder.drafter = drafter
        configs = bench.configs(("sd",), lengths)
        configs += [bench.Config("ssd", k) for k in ssd if drafter is trained]
        plan = bench.BenchPlan(prompts, repeats, configs, max_new_tokens, None, 4)
        runs = list(bench.run_all(decoder, plan, lambda message: None))
        rows = [row for kind in (None, *dict.fromkeys(run.prompt.kind for run in runs)) for row in bench.summary(runs, kind)]
        different = bench.differing(runs)
        show(rows, f"{drafter.name}: evaluation", different, [], None)
        last = [run for run in runs if run.repeat >= 0]
        found[drafter.name] = {
            "rows": rows, "different": different,
            "auto": [{"prompt": run.prompt.name, "repeat": run.repeat, "rounds": run.stats.rounds_by_draft_length}
                     for run in last if run.config.draft_length == AUTO],
            "acceptance_by_position": {run.prompt.name: run.stats.acceptance_by_position for run in last
                                       if run.config.mode == "sd" and run.config.draft_length == longest},
            "policy_seconds": decoder.measured_seconds,
            "capture_s": sum(run.stats.capture_s for run in runs)}
        text = json.dumps({"schema": "tune-kernels/drafters/1", "weights": decoder.source, "recipe": recipe,
                           "device": decoder.model.notes.device, "backend": decoder.model.notes.name, "repeats": repeats,
                           "prompts": [asdict(prompt)["name"] for prompt in prompts], "drafters": found}, sort_keys=True)
        replace_text(out, text + "\n")
    click.echo(text)
    sys.exit(any(of["different"] for of in found.values()))


if __name__ == "__main__":
    main()
