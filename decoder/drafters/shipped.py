"""The drafters that ship with the package. Each belongs to one target, found by its identity."""

from pathlib import Path

from ...shapes.model import ModelShape
from ..request.tokenizer import Tokenizer
from .card import JSON, read_card
from .identity import identity_of

FOLDER = Path(__file__).parent / "data"


def shipped_drafter(shape: ModelShape, tokenizer: Tokenizer | None, folder: Path = FOLDER) -> Path | None:
    """The folder of the drafter that ships for this target, or None. folder: one folder per drafter inside."""
    if tokenizer is None:
        return None
    wanted = identity_of(shape, tokenizer)
    folders = (path.parent for path in sorted(folder.glob(f"*/{JSON}")))
    return next((found for found in folders if read_card(found).target.identity == wanted), None)
