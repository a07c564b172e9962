"""Training of the embedded checkpoint: its corpus, tokenizer, initial parameters, loop, scores and model card."""
