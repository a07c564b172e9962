"""Errors that leave a step."""


class CompileAfterWarmUpError(RuntimeError):
    """A step needed a program that warm-up had not compiled, and the engine was told to treat that as an error."""


class StalledError(RuntimeError):
    """Requests are unfinished, and a step could neither launch nor read nor move anything."""


class ProcessError(RuntimeError):
    """Several processes share the model, and this one cannot launch."""


class LostProcessError(ProcessError):
    """A process that shares the model is lost, or runs something else: the engine cannot recover."""
