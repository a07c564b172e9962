"""Several asyncio callers share one engine: each reads its own stream, and one leaves early."""

import asyncio

from jaxinfer import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=96)


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


async def whole(llm: AsyncLLM, question: str) -> None:
    async for output in llm.chat(conversation(question), PARAMS, output_kind="final"):
        print(f"{question} -> {output.outputs[0].text}")


async def first_words(llm: AsyncLLM, question: str, count: int) -> None:
    stream = await llm.add(conversation(question), PARAMS)
    text = ""
    async for output in stream:
        text += output.outputs[0].text
        if len(text.split()) > count:
            break
    await stream.aclose()  # ends the request; `break` alone does not, while `stream` still refers to it
    print(f"{question} -> {' '.join(text.split()[:count])} ...")


async def main() -> None:
    async with AsyncLLM() as llm:
        await asyncio.gather(
            whole(llm, "Who keeps the lighthouse?"),
            whole(llm, "Who works in the library?"),
            first_words(llm, "Write a guide with three points: build a drum.", 8),
        )


asyncio.run(main())
