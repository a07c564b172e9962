"""Stream one answer as it is written, then two answers that are decoded side by side."""

from jaxinfer import LLM, SamplingParams

llm = LLM()
params = SamplingParams(temperature=0.7, max_tokens=128, seed=1)

question = [{"role": "user", "content": "Write a guide with three points: build a drum."}]
for output in llm.stream(question, params):
    print(output.outputs[0].text, end="", flush=True)
print("\n")

# Several prompts run in one batch. Their request ids grow in the order of the prompts.
questions = ["Who works in the library?", "Who keeps the lighthouse?"]
texts: dict[str, str] = {}
for output in llm.stream([[{"role": "user", "content": question}] for question in questions], params):
    texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
for question, request_id in zip(questions, sorted(texts, key=int), strict=True):
    print(f"{question} -> {texts[request_id]}")
