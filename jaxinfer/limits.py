"""Limits that users meet and programs are compiled for."""

MAX_LOGPROBS = 20  # most likely tokens that a request can ask the log probabilities of
MAX_ENDING_TOKEN_IDS = 8  # of a request that takes part in a decode loop
SCHEDULING_POLICIES = ("fcfs", "priority")
BRANCH_MODES = ("in_one_sequence", "batching")

# In arrays of landed tokens, where -1 is no token: no finite score, so the sequence ends with an error.
NO_SCORE = -2

# Ways to draft tokens.
SPECULATIVE_METHODS = ("draft_model", "ngram", "eagle3")
