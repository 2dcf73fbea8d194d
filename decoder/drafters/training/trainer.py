"""The steps of training: AdamW on the loss of EAGLE-3, evaluations, checkpoints, and the number of steps.

The order of training depends on the seed and the step alone. The number of steps follows from the minutes and the time of the
first steps, and the checkpoint keeps it: an interrupted run ends with the weights of an uninterrupted one of as many steps.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...errors import NumericsError
from .answers import Answer
from .batches import collate, epoch
from .export import drafter_shape
from .loss import training_loss
from .network import DrafterNetwork
from .settings import Sizes
from .target import Target
from .tau import Tau, measure_tau
from .vocabulary import coverage, draft_vocabulary
from .work import Work

STATE = "state.pt"
CALIBRATION = (30, 60)  # the time of a step is measured between these steps; the first ones take longer
MARGIN = 0.97  # share of the remaining time that is planned for steps
LOWEST = 0.03  # share of the learning rate at the end
CLIP = 1.0  # largest norm of the gradient

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """One evaluation. loss: mean since the last evaluation, NaN before the first step; tau: by kind, at K = draft_length;
    seconds: of the run."""

    step: int
    loss: float
    tau: dict[str, float]
    seconds: float


class Trainer:
    """Trains one drafter. answers: the training data, which also give the draft vocabulary; held_out: greedy answers for
    evaluation."""

    def __init__(self, target: Target, answers: Sequence[Answer], held_out: Sequence[Answer], sizes: Sizes, work: Work) -> None:
        self.target, self.answers, self.held_out, self.sizes, self.work = target, answers, held_out, sizes, work
        self.seed, limit = work.settings.seed, target.vocab_limit
        ids = draft_vocabulary(answers, min(work.settings.draft_vocab, limit), limit)
        self.coverage = coverage(held_out, ids, limit)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = DrafterNetwork(drafter_shape(target.shape, len(ids)), ids)
        self.network = network.to(target.device)
        with torch.no_grad():
            self.network.lm_head.weight.copy_(target.head[self.network.ids].float())
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.order = epoch(answers, sizes.batch, self.seed, 0)
        self.epoch = 0
        self.step, self.total = 0, sizes.steps
        self.history: list[Point] = []
        self.losses: list[torch.Tensor] = []  # since the last evaluation, on the device
        self.evaluation_seconds = 0.0

    def run(self, progress: Progress) -> dict[str, Tau]:
        """Runs the remaining steps and returns tau at the end. Evaluates and writes a checkpoint `evaluations` times and at the
        end. Raises NumericsError as `evaluate`."""
        taus = self.measure() if self.restore() else self.evaluate(progress)
        began = self.synchronised()
        while self.total is None or self.step < self.total:
            self.advance()
            if self.total is None and self.step == CALIBRATION[0]:
                began = self.synchronised()
            if self.total is None and self.step == CALIBRATION[1]:
                self.plan((self.synchronised() - began) / (CALIBRATION[1] - CALIBRATION[0]))
            late = self.sizes.steps is None and self.work.seconds > self.work.limit
            if late:
                progress(f"time is up at step {self.step} of {self.total or '?'}")
                self.total = self.step
            if late or (self.total is not None and self.at_evaluation(self.total)):
                taus = self.evaluate(progress)
                self.save()
        return taus

    def at_evaluation(self, total: int) -> bool:
        """Whether this step ends with an evaluation."""
        return self.step >= total or self.step % max(total // self.sizes.evaluations, 1) == 0

    def synchronised(self) -> float:
        """The run's seconds, after the device has finished its work."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return self.work.seconds

    def plan(self, seconds_a_step: float) -> None:
        """Sets the number of steps for the remaining time, less that of evaluations and writing."""
        kept = (self.sizes.evaluations + 3) * self.evaluation_seconds
        left = max(self.work.limit - self.work.seconds - kept, 0.0)
        self.total = self.step + int(MARGIN * left / seconds_a_step)

    def advance(self) -> None:
        """Runs one step. The learning rate rises over `warm_up` steps and falls to LOWEST over all steps."""
        falling = 1.0 if self.total is None else 1 - self.step / self.total
        rate = self.sizes.learning_rate * min(1.0, (self.step + 1) / self.sizes.warm_up) * max(LOWEST, falling)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = collate([self.answers[i] for i in self.batch_of(self.step)], self.target.device)
        loss = training_loss(self.network, self.target, batch, self.sizes.unroll)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.optimiser.step()
        self.losses.append(loss.detach())
        self.step += 1

    def batch_of(self, step: int) -> list[int]:
        """Indices of the answers of a step. Every epoch has the same number of batches."""
        number, place = divmod(step, len(self.order))
        if number != self.epoch:
            self.epoch, self.order = number, epoch(self.answers, self.sizes.batch, self.seed, number)
        return self.order[place]

    def measure(self) -> dict[str, Tau]:
        """tau by kind on the held-out answers, with the current weights."""
        return measure_tau(self.network, self.target, self.held_out, self.sizes.draft_length)

    def evaluate(self, progress: Progress) -> dict[str, Tau]:
        """Measures tau, adds a point to the curve and prints a progress line.

        Raises:
            NumericsError: the loss became NaN or infinite.
        """
        began = self.synchronised()
        taus = self.measure()
        loss = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        if self.losses and not math.isfinite(loss):
            raise NumericsError(f"the loss is {loss} at step {self.step}", expected="a finite loss", action="try another --seed")
        self.losses.clear()
        tau = {kind: found.tokens_per_round for kind, found in taus.items()}
        self.history.append(Point(self.step, loss, tau, self.work.seconds))
        kinds = ", ".join(f"{kind} {value:.2f}" for kind, value in tau.items() if kind != "all")
        progress(f"step {self.step} of {self.total or '?'}, loss {loss:.3f}, tau {tau['all']:.3f} at K = "
                 f"{self.sizes.draft_length} ({kinds}), {self.work.seconds:.0f} of {self.work.limit:.0f} s")
        self.evaluation_seconds = self.synchronised() - began
        return taus

    def save(self) -> None:
        """Writes the checkpoint, published by renaming."""
        state = {"network": self.network.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step,
                 "total": self.total, "history": [dataclasses.asdict(point) for point in self.history]}
        unfinished = self.work.folder / f"{STATE}.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.work.folder / STATE)
        self.work.note_seconds()

    def restore(self) -> bool:
        """Resumes from the checkpoint. Returns False if there is none."""
        path = self.work.folder / STATE
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.total = state["step"], state["total"]
        self.history = [Point(**point) for point in state["history"]]
        return True
