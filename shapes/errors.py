"""The base of every error that a user can cause, anywhere in the project: what was found, what was expected, what to do."""


class UserError(Exception):
    """A mistake that the user can mend. The command line prints it without a traceback.

    exit_code: 2 for wrong usage or wrong input, 1 where the input was right and the work could not be done.
    """

    exit_code = 2

    def __init__(self, found: str, *, expected: str = "", action: str = "") -> None:
        self.found, self.expected, self.action = found, expected, action
        lines = [found]
        if expected:
            lines.append(f"expected: {expected}")
        if action:
            lines.append(f"to do: {action}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.found, self.expected, self.action)


def _rebuild(cls: type[UserError], found: str, expected: str, action: str) -> UserError:
    return cls(found, expected=expected, action=action)


class ShapeError(UserError):
    """A model shape, model config or GPU target that is unknown, incomplete or contradicts itself."""
