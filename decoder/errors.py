"""Errors that a user of the decoder can cause: an unsupported model, an invalid request, a failed check."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..shapes.errors import UserError


class DecoderError(UserError):
    """The base of the decoder's errors."""


class LoadError(DecoderError):
    """Weights, a configuration or a tokenizer are missing, wrong, unsupported or don't go together."""


class RequestError(DecoderError):
    """The decoder can't serve a request."""


class NumericsError(DecoderError):
    """The model's output holds no answer, such as logits that are NaN."""

    exit_code = 1


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes `path`: an OSError inside becomes a RequestError."""
    try:
        yield
    except OSError as e:
        raise RequestError(f"{path}: {e.strerror or e}", expected="a place that can be written, with free space",
                           action="name another one with --out") from None
