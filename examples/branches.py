"""Samples, branches and Skeleton-of-Thought: sequences of one request share the pages of what they begin with."""

from jaxinfer import LLM, SamplingParams

llm = LLM()
greedy = SamplingParams(temperature=0.0, max_tokens=128)

# Sample i has the tokens that the seed 7 + i gives alone.
question = [{"role": "user", "content": "Write a guide with three points: build a drum."}]
(output,) = llm.chat(question, SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=24))
for sample in output.outputs:
    print(f"sample {sample.index}: {sample.text}")

# Several questions about one text, which is computed once. outputs[i] continues prefix + suffixes[i].
prefix = (
    "<|user|>Read the text and answer the question.\nText: The ship Votan sails to Mestad. The captain of Votan is "
    "Broseban. The cargo of Votan is stones. The ship Vagatru sails to Lagroburg. The captain of Vagatru is Mofigre. "
    "The cargo of Vagatru is coins.\nQuestion: "
)
questions = ["Who is the captain of Vagatru?", "What is the cargo of Votan?"]
output = llm.generate_branches(prefix, [f"{question}<|end|><|assistant|>" for question in questions], greedy)
for question, branch in zip(questions, output.outputs, strict=True):
    print(f"branch {branch.index}: {question} -> {branch.text}")

# A plan, then all of its points at once.
answer = llm.skeleton_of_thought("Make a plan with five points: repair a bicycle.", greedy)
print(answer.text)
metrics = answer.metrics
print(f"{len(answer.points)} points, {metrics.point_tokens} tokens in {metrics.point_steps} steps")
