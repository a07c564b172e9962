"""The log of a process that serves."""

import logging


def log_to_stderr() -> None:
    """Write what is logged to stderr, unless the process has another place for it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
