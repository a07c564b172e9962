"""Errors that leave a step."""


class CompileAfterWarmUpError(RuntimeError):
    """A step needed a program that warm-up had not compiled, and the engine was told to treat that as an error."""


class StalledError(RuntimeError):
    """Requests are unfinished, and a step could neither launch nor read nor move anything."""
