"""Limits that users meet and programs are compiled for."""

MAX_LOGPROBS = 20  # most likely tokens per position whose log probabilities a request can ask for
MAX_SAMPLES = 2**14  # completions of one prompt
MAX_LOGIT_BIAS = 320  # tokens that a request can give a bias; OpenAI's API allows 300
MAX_ENDING_TOKEN_IDS = 8  # tokens that end a request in a decode loop
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
BRANCH_MODES = ("in_one_sequence", "batching")
