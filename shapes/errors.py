"""The base of every error that a user can cause: found, expected, action."""

import re

MOST_SHOWN = 4_000  # characters of one part of an error
# Characters that control a terminal or can't be shown: controls except newline and tab, marks of text direction, surrogates
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text that is safe to print: UNPRINTABLE characters are escaped."""
    return UNPRINTABLE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


class UserError(Exception):
    """An error that the user can fix. The command line prints it without a traceback; unprintable characters are escaped.

    exit_code: 2 for wrong usage or input, 1 if the input was right and the work failed.
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
    """A model shape, model config or GPU target that is unknown, incomplete or contradictory."""
