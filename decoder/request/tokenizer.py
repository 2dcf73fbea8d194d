"""The model's tokenizer: text and chat to ids, ids to text, and the comparison of two tokenizers."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LoadError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # decoded text holds it in place of the bytes of an incomplete character
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "vocab.txt")  # any of them is a tokenizer


class Tokenizer:
    """A Hugging Face tokenizer. size: number of ids; a model's embedding may have more rows."""

    def __init__(self, inner: "PreTrainedTokenizerBase") -> None:
        self.inner = inner
        self.size = len(inner)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, with the special tokens that the tokenizer adds.

        Raises:
            RequestError: the text holds a lone surrogate.
        """
        return [int(i) for i in self.inner(unicode_text(text))["input_ids"]]

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.inner, "chat_template", None))

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens by their text. `decode` leaves them out."""
        return {token: int(self.inner.convert_tokens_to_ids(token)) for token in self.inner.all_special_tokens}

    def encode_chat(self, messages: Sequence[object]) -> list[int]:
        """The ids of a conversation under the model's chat template, up to the assistant's answer.

        Raises:
            RequestError: no chat template; the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template", expected="a text or token ids as the prompt")
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as e:  # a template may raise any error
            raise RequestError(f"the chat template refuses these messages: {e}",
                               expected="a list of {'role': ..., 'content': ...}") from None
        return [int(i) for i in self.inner(unicode_text(text), add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary and the special ids. Equal if every id means the same in both tokenizers."""
        content = [sorted(self.inner.get_vocab().items()), sorted(self.inner.all_special_ids)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def unicode_text(text: str) -> str:
    """The text, unchanged. Raises RequestError if it holds a lone surrogate."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("the text holds a lone surrogate", expected="valid Unicode")
    return text


class TextStream:
    """Incremental decoding. It returns only text that later ids can't change.

    ids[start:read] is the context: its text is returned already, and it is decoded again before new ids. It begins with ids that
    have text of their own, since a tokenizer that strips the first space of a text must not strip it from a later word.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.read = 0

    def push(self, token: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        self.ids.append(token)
        return self._next(whole=False)

    def flush(self) -> str:
        """The rest of the text, incomplete characters as U+FFFD."""
        return self._next(whole=True)

    def _next(self, whole: bool) -> str:
        decode = self.tokenizer.decode
        before, after = decode(self.ids[self.start:self.read]), decode(self.ids[self.start:])
        if after.endswith(UNFINISHED) and not whole:
            return ""
        if decode(self.ids[self.read:]):
            self.start = self.read
        self.read = len(self.ids)
        return after[len(before):]


def find_tokenizer(path: Path) -> Tokenizer | None:
    """As `load_tokenizer`, but None for a folder without tokenizer files."""
    none = path.is_dir() and not any((path / name).is_file() for name in FILES)
    return None if none else load_tokenizer(path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or of a GGUF file.

    Raises:
        LoadError: no tokenizer, or one that transformers can't read.
    """
    from transformers import AutoTokenizer

    where: dict[str, str] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **where))
    except Exception as e:  # transformers raises many kinds
        raise LoadError(f"{path}: no readable tokenizer: {str(e).splitlines()[0]}",
                        expected="the tokenizer files of the model, or none at all to serve token ids") from None
