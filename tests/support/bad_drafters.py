"""Drafters that misbehave in every way that a user's drafter could (F3)."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

VOCABULARY = 61  # of the tiny models that they draft for


@dataclass(frozen=True)
class BadAnswer:
    """make: an answer for any method, from its arguments; a fault as a draft and as branches."""

    name: str
    make: Callable[..., Any]


class Unspeakable(Exception):
    """An error whose own text is an error."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS: list[BaseException] = [ZeroDivisionError("by zero"), StopIteration(), SystemExit(3), GeneratorExit(), TimeoutError(),
                               AssertionError(), MemoryError(), Unspeakable(), torch.OutOfMemoryError("GPU")]


def endless(*_: object) -> Any:
    """A draft that never ends."""
    while True:
        yield 1


def breaking(*_: object) -> Any:
    """A draft that fails in the middle."""
    yield 1
    raise OSError("torn")


ANSWERS = [
    BadAnswer("None", lambda *_: None),
    BadAnswer("a number", lambda *_: 5),
    BadAnswer("a text", lambda *_: "12"),
    BadAnswer("bytes", lambda *_: b"12"),
    BadAnswer("floats", lambda *_: [1.0, 2.0]),
    BadAnswer("NaN", lambda *_: [float("nan")]),
    BadAnswer("booleans", lambda *_: [True, np.True_]),
    BadAnswer("texts", lambda *_: ["1", "2"]),
    BadAnswer("placeholders", lambda *_: [-1, -1]),
    BadAnswer("a right token, then one out of range", lambda *_: [3, VOCABULARY]),
    BadAnswer("huge ids", lambda *_: [2**63, 10**400]),
    BadAnswer("nested", lambda *_: [[1, 2], [3]]),
    BadAnswer("a square", lambda *_: torch.zeros(2, 2, dtype=torch.int64)),
    BadAnswer("a scalar tensor", lambda *_: torch.tensor(3)),
    BadAnswer("a float tensor", lambda *_: torch.tensor([1.0, 2.0])),
    BadAnswer("itself", lambda *_: (lambda a: a.append(a) or a)([])),
    BadAnswer("an endless draft", endless),
    BadAnswer("a draft that fails on its way", breaking),
    BadAnswer("too many", lambda *_: [1] * 1000),
    BadAnswer("a table", lambda *_: {"a": [1]}),
    BadAnswer("outcomes of three", lambda *_: {(1, 2, 3): [1]}),
    BadAnswer("outcomes of floats", lambda *_: {(0.5, 1.0): [1]}),
    BadAnswer("too many branches", lambda *_: {(k, t): [1] for k in range(9) for t in range(VOCABULARY)}),
    BadAnswer("branches of rubbish", lambda *_: {(k, t): [None] for k in range(5) for t in range(VOCABULARY)}),
]


class BadDrafter:
    """A drafter that drafts [1, 2, ...], except for methods or attributes that are given as functions."""

    def __init__(self, **bad: Callable[..., Any]) -> None:
        self.bad = bad

    @property
    def name(self) -> Any:
        return self.bad["name"]() if "name" in self.bad else "bad"

    @property
    def feature_layers(self) -> Any:
        return self.bad["feature_layers"]() if "feature_layers" in self.bad else ()

    def _answer(self, method: str, default: Any, *arguments: Any) -> Any:
        return self.bad[method](*arguments) if method in self.bad else default

    def start(self, *arguments: Any) -> Any:
        return self._answer("start", None, *arguments)

    def draft(self, tokens: list[int], length: int) -> Any:
        return self._answer("draft", list(range(1, length + 1)), tokens, length)

    def accept(self, outcome: Any) -> Any:
        return self._answer("accept", None, outcome)

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Any:
        return self._answer("prepare", {(0, 1): list(range(1, length + 1))}, tokens, draft, branches, length)


class NoName:
    """No attribute but the four methods."""

    def start(self, *_: Any) -> None:
        """Nothing."""

    def draft(self, *_: Any) -> list[int]:
        """Nothing."""
        return []

    def accept(self, *_: Any) -> None:
        """Nothing."""

    def prepare(self, *_: Any) -> dict[tuple[int, int], list[int]]:
        """Nothing."""
        return {}


class Rubbish:
    """A drafter that answers as another one, but a random `share` of its answers is bad. Never late."""

    def __init__(self, inner: Any, draw: random.Random, share: float) -> None:
        self.inner, self.draw, self.share = inner, draw, share
        self.name, self.feature_layers = "rubbish", inner.feature_layers

    def _bad(self, *arguments: Any) -> Any:
        if self.draw.random() < 0.3:
            raise self.draw.choice(ERRORS)
        return self.draw.choice(ANSWERS).make(*arguments)

    def start(self, *arguments: Any) -> Any:
        self.inner.start(*arguments)
        return self._bad() if self.draw.random() < self.share / 4 else None

    def draft(self, *arguments: Any) -> Any:
        right = self.inner.draft(*arguments)
        return self._bad(*arguments) if self.draw.random() < self.share else right

    def accept(self, outcome: Any) -> Any:
        self.inner.accept(outcome)
        return self._bad(outcome) if self.draw.random() < self.share / 4 else None

    def prepare(self, *arguments: Any) -> Any:
        right = self.inner.prepare(*arguments)
        return self._bad(*arguments) if self.draw.random() < self.share else right
