"""Answers of the target: the training data of a drafter.

transformers samples them batch by batch, at several temperatures with top-p 0.95. Every third batch asks follow-ups on the
answers of the last batch, which gives longer contexts and repeating text. A batch depends on the seed, its number and, for
follow-ups, the last batch, so an interrupted run resumes with the same answers.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from ...request.tokenizer import Tokenizer
from .prompts import PromptSet, TrainingPrompt
from .target import Target

TEMPERATURES = (0.3, 0.6, 1.0)
TOP_P = 0.95  # rare tokens lead a small model to text unlike any greedy answer
FOLLOW_UP_EVERY = 3

Conversation = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Answer:
    """One prompt with its answer. ids: of both; start: index of the answer's first token; kind: of the prompt."""

    ids: torch.Tensor  # [T] int32, on the CPU
    start: int
    kind: str

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.ids) - self.start


def encode(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The ids of a conversation under the chat template; without one, of its texts one after another."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(conversation)
    return tokenizer.encode("\n\n".join(m["content"] for m in conversation) + "\n\n")


@dataclass(frozen=True)
class Sampler:
    """Samples answers of the target. batch: prompts per batch; new_tokens: most tokens of an answer."""

    target: Target
    prompts: PromptSet
    seed: int
    batch: int
    new_tokens: int

    def sample(self, number: int, before: Sequence[Answer]) -> list[Answer]:
        """The answers of batch `number`. before: those of the last batch."""
        temperature = TEMPERATURES[(number + number // FOLLOW_UP_EVERY) % len(TEMPERATURES)]
        choice = random.Random(f"{self.seed}/{number}")
        if number % FOLLOW_UP_EVERY == FOLLOW_UP_EVERY - 1:
            chats = [self._followed_up(prompt, first, choice) for prompt, first in zip(self._fresh(number - 1), before)]
            kinds = [first.kind for first in before]
        else:
            prompts = self._fresh(number)
            chats, kinds = [_asked(p) for p in prompts], [p.kind for p in prompts]
        return answer(self.target, chats, kinds, self.new_tokens, temperature, choice.getrandbits(32))

    def _followed_up(self, prompt: TrainingPrompt, first: Answer, choice: random.Random) -> Conversation:
        ids = [i for i in first.ids[first.start:].tolist() if i not in self.target.eos_ids]  # some tokenizers decode them to text
        text = self.target.tokenizer.decode(ids)
        return [*_asked(prompt), {"role": "assistant", "content": text},
                {"role": "user", "content": choice.choice(self.prompts.follow_ups)}]

    def held_out(self) -> list[Answer]:
        """The greedy answers to the held-out prompts."""
        prompts = self.prompts.held_out
        return answer(self.target, [_asked(p) for p in prompts], [p.kind for p in prompts], self.new_tokens, 0.0, 0)

    def _fresh(self, number: int) -> list[TrainingPrompt]:
        """The prompts of batch `number`, without follow-ups: each prompt once, then each again in another order."""
        first = (number - number // FOLLOW_UP_EVERY) * self.batch
        places = (divmod(first + i, len(self.prompts.training)) for i in range(self.batch))
        return [self.prompts.training[_order(len(self.prompts.training), self.seed, turn)[place]] for turn, place in places]


@lru_cache(maxsize=2)
def _order(count: int, seed: int, turn: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/order/{turn}").shuffle(order)
    return order


def _asked(prompt: TrainingPrompt) -> Conversation:
    return [{"role": "user", "content": prompt.text}]


@torch.no_grad()
def answer(target: Target, conversations: Sequence[Conversation], kinds: Sequence[str], new_tokens: int, temperature: float,
           seed: int) -> list[Answer]:
    """The answers of one batch, by transformers' generate, padded on the left. kinds: of the prompts; temperature: 0 is greedy.
    An answer includes its end-of-sequence id."""
    from transformers import GenerationConfig

    chats = [encode(target.tokenizer, conversation) for conversation in conversations]
    width = max(len(chat) for chat in chats)
    padding = target.eos_ids[0] if target.eos_ids else 0
    ids = torch.full((len(chats), width), padding)
    mask = torch.zeros(len(chats), width, dtype=torch.long)
    for row, chat in enumerate(chats):
        ids[row, width - len(chat):] = torch.tensor(chat)
        mask[row, width - len(chat):] = 1
    sampling: dict[str, float] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": TOP_P}
    beyond = list(range(target.vocab_limit, target.shape.vocab_size))
    config = GenerationConfig(max_new_tokens=new_tokens, pad_token_id=padding, eos_token_id=target.eos_ids or None,
                              suppress_tokens=beyond or None, **sampling)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        out = target.model.generate(ids.to(target.device), attention_mask=mask.to(target.device), generation_config=config)
    found = out.cpu()
    return [Answer(_cut(found[row, width - len(chat):], len(chat), target.eos_ids), len(chat), kind)
            for row, (chat, kind) in enumerate(zip(chats, kinds))]


def _cut(ids: torch.Tensor, start: int, eos_ids: Sequence[int]) -> torch.Tensor:
    """ids [T] up to and including the first end-of-sequence id of the answer. start: of the answer."""
    ends = torch.isin(ids[start:], torch.tensor(eos_ids, dtype=ids.dtype)).nonzero()
    return (ids[:start + int(ends[0]) + 1] if len(ends) else ids).to(torch.int32).clone()


def save_answers(path: Path, answers: Sequence[Answer], kinds: Sequence[str]) -> None:
    """Writes the answers as one safetensors file, published by renaming. kinds: every kind, in a fixed order."""
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".unfinished")
    save_file({"ids": torch.cat([a.ids for a in answers]), "lengths": torch.tensor([len(a.ids) for a in answers]),
               "starts": torch.tensor([a.start for a in answers]),
               "kinds": torch.tensor([list(kinds).index(a.kind) for a in answers])}, unfinished)
    unfinished.replace(path)


def load_answers(path: Path, kinds: Sequence[str]) -> list[Answer]:
    """The answers in a file of save_answers, with the same kinds."""
    from safetensors.torch import load_file

    stored = load_file(path)
    parts = stored["ids"].split(stored["lengths"].tolist())
    return [Answer(ids.clone(), start, kinds[kind])
            for ids, start, kind in zip(parts, stored["starts"].tolist(), stored["kinds"].tolist())]
