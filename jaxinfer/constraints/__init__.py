"""Constraints on outputs: regular expressions and automata over the tokens of a vocabulary."""
