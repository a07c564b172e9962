"""Answer several conversations in one batch and continue a plain text, with the embedded checkpoint."""

from jaxinfer import LLM, SamplingParams

llm = LLM()
greedy = SamplingParams(temperature=0.0, max_tokens=128)

questions = [
    "How old is the lighthouse?",
    "Who works in the library?",
    "Write a guide with three points: build a drum.",
]
conversations = [[{"role": "user", "content": question}] for question in questions]
for question, output in zip(questions, llm.chat(conversations, greedy), strict=True):
    completion = output.outputs[0]
    print(f"{question}\n{completion.text}\n({len(completion.token_ids)} tokens, {completion.finish_reason})\n")

# `generate` continues a text as it is written. This text has the form of the embedded model's chat template.
(output,) = llm.generate("<|user|>Are you a robot?<|end|><|assistant|>", greedy)
print(f"{output.prompt} -> {output.outputs[0].text}")
