"""Training a drafter: prompts, loss and tau against plain recomputation, runs that are killed, and what is written, read by
the strict loader and by an independent reader."""

import dataclasses
import json
import math
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from eagle3_reader import read_drafter
from helpers import assert_same_bytes
from safetensors.torch import load_file
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.cli import main
from tune_kernels.decoder.drafters.card import Card, read_card
from tune_kernels.decoder.drafters.training.answers import Answer
from tune_kernels.decoder.drafters.training.batches import collate, epoch
from tune_kernels.decoder.drafters.training.export import write_drafter
from tune_kernels.decoder.drafters.training.loss import DECAY, training_loss
from tune_kernels.decoder.drafters.training.prompts import load_file as load_groups
from tune_kernels.decoder.drafters.training.prompts import load_prompts
from tune_kernels.decoder.drafters.training.settings import CPU, Settings, Sizes
from tune_kernels.decoder.drafters.training.target import Target
from tune_kernels.decoder.drafters.training.tau import rounds_of
from tune_kernels.decoder.drafters.training.train import train_drafter
from tune_kernels.decoder.drafters.training.trainer import CALIBRATION, Trainer
from tune_kernels.decoder.drafters.training.vocabulary import coverage, draft_vocabulary
from tune_kernels.decoder.drafters.training.work import Work
from tune_kernels.decoder.errors import LoadError
from tune_kernels.decoder.request.tokenizer import load_tokenizer
from tune_kernels.schedules.recipe import Recipe

LAYERS = 8
EVALUATION = Path(__file__).parents[3] / "decoder" / "checks" / "data" / "prompts.toml"
SIZES = dataclasses.replace(CPU, answer_batch=12, new_tokens=24, batch=6, answer_batches=3, steps=32, evaluations=4, warm_up=4,
                            unroll=3, learning_rate=3e-3)
CPU_DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def target_folder(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def own_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short ones: a byte is a token here."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(f"say {word} {n}" for word in ("red", "blue", "green") for n in range(10)))
    return path


def settings(target_folder: Path, out: Path, prompts: Path, **changes: Any) -> Settings:
    return Settings(**({"weights": str(target_folder), "out": out, "draft_vocab": 100, "prompts": prompts} | changes))


@pytest.fixture(scope="module")
def trained(target_folder: Path, own_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Card, list[str]]:
    out, lines = tmp_path_factory.mktemp("trained") / "drafter", list[str]()
    return out, train_drafter(settings(target_folder, out, own_prompts), SIZES, CPU_DEVICE, lines.append), lines


# prompts


def words(text: str) -> set[str]:
    """The words that carry a text's meaning."""
    return set(re.findall(r"[a-z]{3,}", text.lower())) - {"the", "and", "for", "with", "that", "who", "how"}


def test_no_prompt_is_one_of_the_checks_or_benchmarks() -> None:
    """No topic's words stand together in an evaluation or tuning prompt."""
    table = tomllib.loads(EVALUATION.read_text())
    judged = [entry["text"] for name in ("evaluation", "tuning") for entry in table[name]]
    prompts = load_prompts(None, 0)
    assert not {p.text for p in (*prompts.training, *prompts.held_out)} & set(judged)
    for group in load_groups().group:
        for topic in (*group.topics, *group.held_out_topics):
            assert words(topic), topic
            assert not [text for text in judged if words(topic) <= words(text)], topic


def test_topics_of_held_out_prompts_are_never_trained_on() -> None:
    groups = load_groups().group
    trained_on = [words(topic) for group in groups for topic in group.topics]
    for group in groups:
        for topic in group.held_out_topics:
            assert not [other for other in trained_on if words(topic) <= other or other <= words(topic)], topic
            assert not [p for p in load_prompts(None, 0).training if topic in p.text]


def test_the_shipped_prompts() -> None:
    prompts = load_prompts(None, 0)
    assert prompts.kinds == ("code", "maths", "prose")
    assert len(prompts.training) == len(set(prompts.training)) > 5000
    for kind in prompts.kinds:
        assert len({p for p in prompts.held_out if p.kind == kind}) == 20
    other = load_prompts(None, 1)
    assert other.held_out == prompts.held_out and other.training != prompts.training
    assert set(other.training) == set(prompts.training)
    assert not [p for p in (*prompts.training, *prompts.held_out) if "{" in p.text]


def test_prompts_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("\n".join([*(f"prompt {n}" for n in range(40)), "", "prompt 3", "  prompt 4 "]))
    prompts = load_prompts(path, 0)
    assert len(prompts.training) == 36 and len(prompts.held_out) == 4
    assert len({p.text for p in (*prompts.training, *prompts.held_out)}) == 40
    path.write_text("one\n" * 50)
    with pytest.raises(LoadError, match="1 different prompts"):
        load_prompts(path, 0)
    with pytest.raises(LoadError, match="one prompt per line"):
        load_prompts(tmp_path / "nowhere.txt", 0)


# the parts


def test_rounds_are_counted_as_the_engine_counts_them() -> None:
    """Prompt of 3, then 7 tokens, of which the prompt's pass gives the first; right[s]: right tokens of a draft from s on."""
    answer = Answer(torch.arange(10, dtype=torch.int32), 3, "x")
    assert rounds_of(answer, [0] * 10, 4) == (6, [0] * 6)
    assert rounds_of(answer, [4] * 10, 4) == (6, [4, 0])
    assert rounds_of(answer, [9, 9, 2, 9, 9, 1, 9, 0, 9, 9], 4) == (6, [2, 1, 0])
    assert rounds_of(answer, [4] * 10, 2) == (6, [2, 2])


def test_the_draft_vocabulary_is_the_most_frequent_part_of_the_answers() -> None:
    answers = [Answer(torch.tensor([9, 9, 9, 5, 5, 2, 7], dtype=torch.int32), 3, "x"),
               Answer(torch.tensor([1, 7, 0], dtype=torch.int32), 1, "x")]
    assert draft_vocabulary(answers, 2, 12).tolist() == [5, 7]
    assert draft_vocabulary(answers, 3, 12).tolist() == [0, 5, 7]
    assert draft_vocabulary(answers, 6, 12).tolist() == [0, 1, 2, 3, 5, 7]
    assert coverage(answers, torch.tensor([5, 7]), 12) == pytest.approx(4 / 6)


def test_an_epoch_is_every_answer_once_in_batches_alike_in_length() -> None:
    answers = [Answer(torch.zeros(5 + n * 7 % 90, dtype=torch.int32), 2, "x") for n in range(103)]
    batches = epoch(answers, 10, 3, 1)
    assert sorted(i for batch in batches for i in batch) == list(range(103))
    assert max(map(len, batches)) == 10 and batches != epoch(answers, 10, 3, 2)
    padding = sum(max(len(answers[i].ids) for i in b) * len(b) - sum(len(answers[i].ids) for i in b) for b in batches)
    assert padding < 0.15 * sum(len(a.ids) for a in answers)


@pytest.fixture(scope="module")
def tiny(target_folder: Path) -> Target:
    return Target(load_checkpoint(str(target_folder), None, CPU_DEVICE), load_tokenizer(target_folder), CPU_DEVICE, torch.float32)


def a_trainer(target: Target, work: Path, sizes: Sizes = SIZES, count: int = 4) -> Trainer:
    """On made-up answers of several lengths."""
    draw = torch.Generator().manual_seed(1)
    answers = [Answer(torch.randint(32, 127, (14 + 3 * n,), generator=draw, dtype=torch.int32), 5 + n, "x") for n in range(count)]
    return Trainer(target, answers, answers, sizes, Work(Settings("", work / "out", draft_vocab=40)))


def test_the_loss_is_that_of_each_draft_computed_alone(tiny: Target, tmp_path: Path) -> None:
    """Every draft of every answer, from its first entry on, through the independent reader: the same mean cross-entropy."""
    trainer = a_trainer(tiny, tmp_path)
    found = training_loss(trainer.network, tiny, collate(trainer.answers, CPU_DEVICE), SIZES.unroll).item()
    write_drafter(tmp_path / "written", trainer.network, tiny.layers, "bf16")
    plain = read_drafter(tmp_path / "written", tiny.model.get_input_embeddings().weight)
    plain = dataclasses.replace(plain, tensors=plain.tensors | dict(trainer.network.state_dict()))
    terms: list[list[float]] = [[] for _ in range(SIZES.unroll)]
    for answer in trainer.answers:
        ids = answer.ids.tolist()
        with torch.no_grad():
            out = tiny.model(answer.ids[None].long(), output_hidden_states=True)
            features = torch.cat([out.hidden_states[i][0] for i in (2, LAYERS // 2, LAYERS - 3)], -1)
            for first in range(answer.start - 1, len(ids) - 2):
                rows = plain.reduce(features[:first + 1])
                for step in range(min(SIZES.unroll, len(ids) - 2 - first)):
                    logits, feature = plain.step(ids[1:first + 2 + step], rows)
                    rows = torch.cat([rows, feature[None]])
                    wanted = out.logits[0, first + 1 + step, :tiny.vocab_limit].double()
                    if int(wanted.argmax()) in trainer.network.ids:
                        p = torch.softmax(wanted[trainer.network.ids], -1)
                        terms[step].append(float(-(p * torch.log_softmax(logits, -1)).sum()))
    assert min(map(len, terms)) > 3
    assert found == pytest.approx(sum(DECAY**j * sum(t) / len(t) for j, t in enumerate(terms)), rel=1e-4)


def test_bf16_trains_as_well(tiny: Target, target_folder: Path, tmp_path: Path) -> None:
    """The products of a GPU run, here on the CPU: fp32 weights, bf16 products, a loss that falls as fp32's does."""
    low = Target(load_checkpoint(str(target_folder), None, CPU_DEVICE), tiny.tokenizer, CPU_DEVICE, torch.bfloat16)
    losses = {}
    for target in (tiny, low):
        trainer = a_trainer(target, tmp_path / str(target.dtype), dataclasses.replace(SIZES, steps=12, bf16=target is low))
        for _ in range(12):
            trainer.advance()
        assert all(p.dtype == torch.float32 for p in trainer.network.parameters())
        losses[target.dtype] = [float(loss) for loss in trainer.losses]
    assert losses[torch.bfloat16][0] == pytest.approx(losses[torch.float32][0], rel=0.02)
    assert losses[torch.bfloat16][-1] == pytest.approx(losses[torch.float32][-1], rel=0.05)
    assert losses[torch.bfloat16][-1] < 0.9 * losses[torch.bfloat16][0]


# whole runs


def test_a_run_says_how_it_goes_and_writes_what_it_did(trained: tuple[Path, Card, list[str]]) -> None:
    out, card, lines = trained
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == SIZES.evaluations + 1
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in steps[1:]]
    uniform = math.log(100) * sum(DECAY**step for step in range(SIZES.unroll))
    assert losses[-1] < uniform < losses[0]
    assert losses == sorted(losses, reverse=True)
    assert re.fullmatch(r"step 32 of 32, loss \d+\.\d+, tau \d\.\d{3} at K = 4 \(own \d\.\d\d\), \d+ of 600 s", steps[-1])
    assert read_card(out) == card
    assert card.training.steps == 32 and card.data.answers == 36 and card.data.held_out_prompts == 3
    assert card.bytes == (out / "model.safetensors").stat().st_size
    assert f"{card.tau():.3f}" in (out / "card.md").read_text()
    picture = ElementTree.parse(out / "curve.svg")
    assert len(picture.findall(".//{*}polyline")) == 3  # loss, tau of all, tau of its kind


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_both_readers_give_the_same_drafts(storage: str, trained: tuple[Path, Card, list[str]], target_folder: Path, tiny: Target,
                                           own_prompts: Path, recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    """The engine's drafter, through the strict loader, drafts what the independent reader drafts, at every round."""
    out = trained[0]
    if storage == "int8":
        work = tmp_path / "again"
        train_drafter(settings(target_folder, work, own_prompts, storage="int8"), SIZES, CPU_DEVICE, lambda line: None)
        assert (work / "model.safetensors").stat().st_size < 0.6 * (out / "model.safetensors").stat().st_size
        out = work
    decoder = Decoder.load(str(target_folder), recipe=recipe_of("fp32"), drafter=str(out))
    plain = read_drafter(out, tiny.model.get_input_embeddings().weight.detach())
    ids = decoder.token_ids([{"role": "user", "content": "say red 3"}])
    whole = ids + decoder.generate(ids, "ar", max_new_tokens=24, ignore_eos=True).token_ids
    with torch.no_grad():
        states = tiny.model(torch.tensor([whole]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in (2, LAYERS // 2, LAYERS - 3)], -1)
    for known in range(len(ids) + 1, len(whole)):
        decoder.drafter.start(whole[:known], features[:known - 1], decoder.drafter.chooser)
        assert decoder.drafter.draft(whole[:known], 4) == plain.draft(whole[:known], features[:known - 1], 4)


def test_the_engine_measures_the_tau_that_training_reports(trained: tuple[Path, Card, list[str]], target_folder: Path,
                                                           own_prompts: Path, recipe_of: Callable[..., Recipe]) -> None:
    """tau of the stored weights on the held-out prompts, by the engine's own rounds."""
    out, card, _ = trained
    decoder = Decoder.load(str(target_folder), recipe=recipe_of("fp32"), drafter=str(out))
    prompts = load_prompts(own_prompts, 0).held_out
    stats = [decoder.generate([{"role": "user", "content": p.text}], "sd", max_new_tokens=SIZES.new_tokens, draft_length=4).stats
             for p in prompts]
    result = next(r for r in card.stored_results if r.kind == "all")
    assert (sum(s.emitted for s in stats), sum(s.rounds for s in stats)) == (result.tokens, result.rounds)
    assert card.tau() == pytest.approx(result.tokens / result.rounds, abs=1e-4) and card.tau() > 1


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.mark.parametrize("at", ["answers 24", "step 16 ", "step 32 "])
def test_a_killed_run_goes_on_to_the_same_weights(at: str, trained: tuple[Path, Card, list[str]], target_folder: Path,
                                                  own_prompts: Path, tmp_path: Path) -> None:
    """Killed while it gathers answers, before it has written the checkpoint of step 16, or before the last one."""
    chosen = settings(target_folder, tmp_path / "out", own_prompts)

    def kill(line: str) -> None:
        if line.startswith(at):
            raise Killed

    with pytest.raises(Killed):
        train_drafter(chosen, SIZES, CPU_DEVICE, kill)
    assert not (chosen.out / "model.safetensors").exists()
    lines: list[str] = []
    card = train_drafter(chosen, SIZES, CPU_DEVICE, lines.append)
    assert sum(line.startswith("step") for line in lines) <= SIZES.evaluations + 1 - (at != "answers 24")
    ours, theirs = load_file(chosen.out / "model.safetensors"), load_file(trained[0] / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert_same_bytes(tensor, theirs[name], name)
    assert card.stored_results == trained[1].stored_results


@pytest.mark.parametrize(("tick", "planned"), [(0.02, True), (0.5, False)])
def test_the_minutes_are_kept(tick: float, planned: bool, target_folder: Path, own_prompts: Path, tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and steps follow from the time, here from a clock that moves on whenever it is read; where the time is up before
    the plan's end, the run ends with a drafter all the same."""
    read = count(1)
    monkeypatch.setattr(Work, "seconds", property(lambda work: next(read) * tick))
    sizes, lines = dataclasses.replace(SIZES, steps=None, answer_batches=None), list[str]()
    card = train_drafter(settings(target_folder, tmp_path / "out", own_prompts, minutes=0.1), sizes, CPU_DEVICE, lines.append)
    late = [line for line in lines if line.startswith("time is up")]
    assert bool(late) != planned
    assert (card.training.steps > CALIBRATION[1]) == planned and card.training.steps > 0
    assert card.data.answers >= 12 * (2 if planned else 1)
    assert f"step {card.training.steps} of {card.training.steps}" in lines[-2]


# what a user can get wrong


def test_folders_that_are_refused(trained: tuple[Path, Card, list[str]], target_folder: Path, own_prompts: Path,
                                  tmp_path: Path) -> None:
    def refused(message: str, out: Path, **changes: Any) -> None:
        with pytest.raises(LoadError, match=message):
            train_drafter(settings(target_folder, out, own_prompts, **changes), SIZES, CPU_DEVICE, kill)

    def kill(line: str) -> None:
        raise Killed

    refused("holds a drafter already", trained[0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    refused("is not empty and holds no interrupted run", tmp_path / "other")
    refused("is not empty and holds no interrupted run", tmp_path / "other" / "file")
    with pytest.raises(Killed):
        train_drafter(settings(target_folder, tmp_path / "begun", own_prompts), SIZES, CPU_DEVICE, kill)
    refused("interrupted run with seed 0, not 1", tmp_path / "begun", seed=1)
    refused("interrupted run with draft_vocab 100, not 99", tmp_path / "begun", draft_vocab=99)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--weights", "{target}"], r"no GPU: on this CPU \(\d+ GFLOP/s\) a useful drafter of .* takes about \d+ hours"),
    (["--weights", "{target}", "--device", "cuda:99"], "cuda:99"),
    (["--weights", "random:0", "--device", "cpu"], "need a model shape"),
    (["--weights", "/nowhere", "--device", "cpu"], "no such file"),
    (["--weights", "{target}", "--device", "cpu", "--prompts", "/nowhere"], "one prompt per line"),
    (["--weights", "{target}", "--device", "cpu", "--minutes", "0"], "minutes"),
    (["--weights", "{shallow}", "--device", "cpu"], "at least 7 layers"),
])
def test_wrong_usage_exits_with_2(arguments: list[str], message: str, target_folder: Path, tiny_folders: dict[str, Path],
                                  tmp_path: Path) -> None:
    if torch.cuda.is_available() and "no GPU" in message:
        pytest.skip("this machine has a GPU")
    given = [a.format(target=target_folder, shallow=tiny_folders["llama"]) for a in arguments]
    result = CliRunner().invoke(main, ["train-drafter", "--out", str(tmp_path / "out"), *given])
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output) and "Traceback" not in result.output


def test_the_command(target_folder: Path, own_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tune_kernels.decoder.drafters.training import settings as module

    monkeypatch.setattr(module, "CPU", SIZES)
    given = ["--weights", str(target_folder), "--prompts", str(own_prompts), "--draft-vocab", "100", "--device", "cpu"]
    result = CliRunner().invoke(main, ["train-drafter", "--out", str(tmp_path / "out"), "--json", *given])
    assert result.exit_code == 0, result.output
    card = json.loads(result.stdout)
    assert card["training"]["steps"] == 32 and card["storage"] == "bf16"
    assert "step 32 of 32" in result.stderr
