"""What a request may write: regular expressions and automata over the tokens of a vocabulary."""
