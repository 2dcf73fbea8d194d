"""One request, checked before anything runs: its prompt as token ids, its options, its end conditions."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ...schedules.recipe import Recipe
from ..backend import Model
from ..draft_length import AUTO, MOST
from ..drafter import Drafter, max_rows, name_of
from ..errors import RequestError
from ..sampling import SEEDS, Chooser
from ..stats import MODES
from .arguments import as_whole, elements, number, shown, switch, texts, token_ids, whole
from .output import EndRules
from .tokenizer import Tokenizer

MOST_TOKENS = 2**31 - 1  # positions are int32
LEAST_TEMPERATURE = 1e-6  # above 0: logits / temperature stays far from fp64's largest number

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class RequestOptions(TypedDict, total=False):
    """The options of `generate` and `stream`; defaults in parentheses.

    max_new_tokens (128). draft_length (4; "auto" without a mode): K. branches (4): outcomes that SSD prepares for. stop:
    strings that end the request and aren't part of the text. stop_token_ids: ids that end the request and are part of its ids.
    ignore_eos (False). temperature (0): 0 is greedy. top_k (0), top_p (1), min_p (0): see sampling.Chooser. seed (random):
    0..2^64 - 1. logprobs (None): alternatives per token; None for no log-probabilities.
    """

    max_new_tokens: int
    draft_length: int | str
    branches: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    logprobs: int | None


@dataclass(frozen=True)
class Server:
    """The parts of a decoder. A request is checked against them."""

    model: Model
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    recipe: Recipe
    drafter: Drafter | None
    capacity: int


@dataclass(frozen=True)
class Request:
    """A checked request. logprobs: alternatives per token; None for no log-probabilities. chat: whether the prompt was messages;
    a chat's turn reuses the keys of the turn before."""

    prompt: list[int]
    chat: bool
    mode: str
    rules: EndRules
    draft_length: int
    auto: bool
    branches: int
    chooser: Chooser
    logprobs: int | None


def checked(server: Server, prompt: Prompt, mode: str | None, options: RequestOptions) -> Request:
    """The request, with the defaults of RequestOptions.

    Raises:
        RequestError: an option is unknown, of a wrong type or out of range; the request needs a drafter, a tokenizer or slots
            that the decoder lacks.
    """
    unknown = sorted(set(options) - set(RequestOptions.__annotations__))
    if unknown:
        raise RequestError(f"unknown option {unknown[0]}", expected=f"one of {', '.join(RequestOptions.__annotations__)}")
    ids = prompt_ids(server, prompt)
    chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    chosen = _mode(server, mode)
    limit = whole("max_new_tokens", options.get("max_new_tokens", 128), 1, MOST_TOKENS)
    _check_room(server, len(ids), limit)
    asked = options.get("draft_length", AUTO if mode is None else 4)
    auto = isinstance(asked, str) and asked == AUTO
    draft_length = _longest(server, chosen) if auto else _draft_length(server, chosen, asked)
    branches = whole("branches", options.get("branches", 4), 1, server.recipe.row_tile, ", the rows of one draft pass")
    logprobs = options.get("logprobs")
    if logprobs is not None:
        logprobs = whole("logprobs", logprobs, 0, server.model.shape.vocab_size, ", or None for no log-probabilities")
    return Request(ids, chat, chosen, _end_rules(server, options, limit), draft_length, auto, branches, _chooser(options),
                   logprobs)


def prompt_ids(server: Server, prompt: object) -> list[int]:
    """The prompt as token ids: text by the tokenizer, messages by the chat template, ids unchanged.

    Raises:
        RequestError: an empty prompt; text without a tokenizer; an id that the model doesn't have.
    """
    text, items = prompt if isinstance(prompt, str) else None, list[object]()
    if text is None:
        items = elements("the prompt", prompt if not isinstance(prompt, set | frozenset) else None,
                         "a text, a list of chat messages, or a list of token ids")
    is_chat = bool(items) and isinstance(items[0], Mapping)
    if server.tokenizer is None and (text is not None or is_chat):
        raise RequestError("the model has no tokenizer", expected="token ids as the prompt")
    if text is not None and server.tokenizer:
        ids = server.tokenizer.encode(text)
    elif is_chat and server.tokenizer:
        ids = server.tokenizer.encode_chat(items)
    else:
        ids = token_ids("the prompt", items, server.model.vocab_limit)
    if not ids:
        raise RequestError("the prompt is empty", expected="at least one token")
    return ids


def _mode(server: Server, mode: object) -> str:
    chosen = ("sd" if server.drafter else "ar") if mode is None else mode
    if not isinstance(chosen, str) or chosen not in MODES:
        raise RequestError(f"unknown mode {shown(mode)}", expected=f"one of {', '.join(MODES)}")
    if chosen != "ar" and server.drafter is None:
        raise RequestError(f"mode {chosen} needs a drafter", action="load the decoder with drafter='ngram' or a model")
    return chosen


def _longest(server: Server, mode: str) -> int:
    """The longest draft of draft_length="auto"; SSD's length is fixed, so there it is the default."""
    rows = max_rows(server.drafter) if server.drafter is not None and mode != "ar" else None
    most = min(server.recipe.row_tile, server.model.max_rows, rows or server.recipe.row_tile) - 1
    return min(most, MOST if mode == "sd" else 4)


def _draft_length(server: Server, mode: str, value: object) -> int:
    most = min(server.recipe.row_tile, server.model.max_rows) - 1
    length = whole("draft_length", value, 1, most, f": recipe {server.recipe.name} verifies {most + 1} rows at once here")
    rows = max_rows(server.drafter) if server.drafter is not None and mode != "ar" else None
    if server.drafter is not None and rows is not None and length >= rows:
        raise RequestError(f"draft_length is {length}: a pass of drafter {name_of(server.drafter)} takes {rows} rows",
                           expected=f"1 to {rows - 1}: a draft and the token before it are one pass",
                           action="ask for shorter drafts, or load another drafter")
    return length


def _check_room(server: Server, prompt: int, max_new_tokens: int) -> None:
    need, capacity = prompt + max_new_tokens - 1, server.capacity
    if need > capacity:
        raise RequestError(
            f"a prompt of {prompt} tokens and {max_new_tokens} new ones need {prompt} + {max_new_tokens} - 1 = {need} "
            f"slots; the KV cache has {capacity}", expected=f"max_new_tokens of at most {capacity - prompt + 1}"
            if prompt <= capacity else f"a prompt of at most {capacity} tokens",
            action=f"shorten the request, or load the decoder with a larger capacity "
            f"(the model has {server.model.shape.max_position} positions)")


def _end_rules(server: Server, options: RequestOptions, limit: int) -> EndRules:
    """The conditions that end the request. A stop string that is a special token becomes a stop id: no text holds it."""
    stop = texts("stop", options.get("stop"))
    if stop and server.tokenizer is None:
        raise RequestError("stop strings need a tokenizer; the model has none", action="pass stop_token_ids")
    special = server.tokenizer.special_ids if server.tokenizer else {}
    stop_ids = token_ids("stop_token_ids", options.get("stop_token_ids", ()), server.model.shape.vocab_size)
    eos = frozenset[int]() if switch("ignore_eos", options.get("ignore_eos", False)) else server.eos_ids
    return EndRules(limit, eos, frozenset(stop_ids) | {special[text] for text in stop if text in special}, stop)


def _chooser(options: RequestOptions) -> Chooser:
    allowed = f"0 (greedy), or a number from {LEAST_TEMPERATURE:g} on"
    temperature = number("temperature", options.get("temperature", 0.0), allowed)
    if temperature != 0 and temperature < LEAST_TEMPERATURE:
        raise RequestError(f"temperature is {temperature}", expected=allowed)
    top_p = number("top_p", options.get("top_p", 1.0), "above 0 and at most 1")
    if not 0 < top_p <= 1:
        raise RequestError(f"top_p is {top_p}", expected="above 0 and at most 1")
    min_p = number("min_p", options.get("min_p", 0.0), "0 to 1")
    if not 0 <= min_p <= 1:
        raise RequestError(f"min_p is {min_p}", expected="0 to 1")
    top_k = whole("top_k", options.get("top_k", 0), 0, MOST_TOKENS, "; 0 for no limit")
    seed = options.get("seed")
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    if as_whole(seed) is None or not 0 <= seed < SEEDS:
        raise RequestError(f"seed is {shown(seed)}", expected="a whole number from 0 to 2^64 - 1")
    return Chooser(temperature, top_p, int(seed), top_k, min_p)
