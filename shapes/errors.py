"""The base of every error that a user can cause: the fault, the expected state, the action to take."""

import re

MOST_SHOWN = 4_000  # characters of one part of an error
# a terminal obeys or can't show them: controls but newline and tab, marks that turn the direction of text, surrogates
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from outside as it may stand on a terminal: UNPRINTABLE characters spelled out."""
    return UNPRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


class UserError(Exception):
    """A mistake that the user can mend. The command line prints it without a traceback; text that came from a
    file is spelled out where a terminal would obey it.

    exit_code: 2 for wrong usage or wrong input, 1 where the input was right and the work could not be done.
    """

    exit_code = 2

    def __init__(self, found: str, *, expected: str = "", action: str = "") -> None:
        self.found, self.expected, self.action = (printable(part[:MOST_SHOWN]) for part in (found, expected, action))
        lines = [self.found]
        if expected:
            lines.append(f"expected: {self.expected}")
        if action:
            lines.append(f"to do: {self.action}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.found, self.expected, self.action)


def _rebuild(cls: type[UserError], found: str, expected: str, action: str) -> UserError:
    return cls(found, expected=expected, action=action)


class ShapeError(UserError):
    """A model shape, model config or GPU target that is unknown, incomplete or contradicts itself."""
