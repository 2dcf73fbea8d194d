"""Errors that a user of the decoder can cause: an unsupported model, an impossible request, a failed check."""

from pathlib import Path

from ..shapes.errors import UserError


class DecoderError(UserError):
    """The base of the decoder's errors."""


class LoadError(DecoderError):
    """Weights, a configuration or a tokenizer that are missing, wrong, unsupported or don't go together."""


class RequestError(DecoderError):
    """A request that this decoder can't serve."""


def cannot_write(path: Path, error: OSError) -> RequestError:
    """The user's error of a disk that refuses."""
    return RequestError(f"{path}: {error.strerror or error}", expected="a place that can be written, with room in it",
                        action="name another one with --out")


class NumericsError(DecoderError):
    """The model computed something that has no answer, such as logits that are NaN."""

    exit_code = 1
