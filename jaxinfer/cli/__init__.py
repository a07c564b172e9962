"""The command line: `main` dispatches, and each command is a module."""
