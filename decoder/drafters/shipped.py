"""The drafters that come with the package, found by their target's identity: never given to another model."""

from pathlib import Path

from ...shapes.model import ModelShape
from ..request.tokenizer import Tokenizer
from .card import JSON, read_card
from .identity import identity_of

FOLDER = Path(__file__).parent / "data"


def shipped_drafter(shape: ModelShape, tokenizer: Tokenizer | None, folder: Path = FOLDER) -> Path | None:
    """The folder of the drafter made for this target, or None if none ships."""
    if tokenizer is None:
        return None
    wanted = identity_of(shape, tokenizer)
    folders = (path.parent for path in sorted(folder.glob(f"*/{JSON}")))
    return next((found for found in folders if read_card(found).target.identity == wanted), None)
