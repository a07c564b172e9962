"""Decode with the embedded draft model: the same tokens as plain decoding, from fewer steps of the target."""

from jaxinfer import LLM, SamplingParams

questions = ["Write a guide with three points: build a drum.", "Write a guide with three points: train a parrot."]
conversations = [[{"role": "user", "content": question}] for question in questions]
params = SamplingParams(temperature=0.8, max_tokens=128, seed=7)

plain = LLM()
# `adaptive=None` drafts in every round. The default, "cost", drafts only where that is measured to be faster.
speculating = LLM(speculative_config={"method": "draft_model", "num_speculative_tokens": 4, "adaptive": None})

expected, found = (llm.chat(conversations, params) for llm in (plain, speculating))
same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(expected, found, strict=True)]
metrics = speculating.get_metrics()
accepted = metrics.spec_decode_num_accepted_tokens / metrics.spec_decode_num_draft_tokens
print(found[0].outputs[0].text)
print(f"same tokens: {all(same)}")
print(f"steps: {plain.get_metrics().num_steps_total} plain, {metrics.num_steps_total} with drafts")
print(f"drafted tokens that were accepted: {accepted:.0%}")
