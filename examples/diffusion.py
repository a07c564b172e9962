"""Answer with the embedded block-diffusion model, under two rules for what a round commits."""

from jaxinfer import LLM, SamplingParams

questions = ["Who works in the library?", "Write a guide with three points: build a drum."]
conversations = [[{"role": "user", "content": question}] for question in questions]
params = SamplingParams(temperature=0.0, max_tokens=128)

for config in ({"threshold": 0.9}, {"unmask": "hierarchy", "threshold": 0.95, "low_threshold": 0.6}):
    llm = LLM("tiny-diffusion", diffusion_config=config)
    outputs = llm.chat(conversations, params)
    print(f"{config}: {llm.get_metrics().diffusion_tokens_per_forward:.1f} tokens a forward")
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question}\n{output.outputs[0].text}")
