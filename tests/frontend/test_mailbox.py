"""A slow reader gets merged outputs that add up to those of a reader that takes each at once."""

from __future__ import annotations

import random

import pytest

from jaxinfer.frontend.mailbox import Mailbox
from jaxinfer.outputs import CompletionOutput, DenoisedBlock, Logprob, RequestOutput


def part(index: int, count: int, first: int, *, reason: str | None = None) -> CompletionOutput:
    """`count` tokens of a completion, from its `first` one on."""
    tokens = list(range(first, first + count))
    return CompletionOutput(
        index, "".join(f"<{token}>" for token in tokens), tokens, cumulative_logprob=-float(first + count),
        logprobs=[{token: Logprob(-1.0, 1)} for token in tokens], finish_reason=reason,
        stop_reason=7 if reason == "stop" else None,
        token_sources=[("drawn", "draft")[token % 2] for token in tokens],
        blocks=[DenoisedBlock(first, [token, None]) for token in tokens],
    )  # fmt: skip


def output(parts: list[CompletionOutput], **fields) -> RequestOutput:
    return RequestOutput("3", "text", [1, 2], parts, **{"finished": False, **fields})


def stream(rng: random.Random) -> list[RequestOutput]:
    """What an engine says of a request with up to three completions, one or several of which have news at a time."""
    lengths = [rng.randint(0, 6) for _ in range(rng.randint(1, 3))]
    reasons = [rng.choice(["stop", "length", "abort", "error"]) for _ in lengths]
    done, found = [0] * len(lengths), []
    open_ones = list(range(len(lengths)))
    while open_ones:
        parts = []
        for index in sorted(rng.sample(open_ones, rng.randint(1, len(open_ones)))):
            count = rng.randint(0, lengths[index] - done[index])
            ends = done[index] + count == lengths[index] and rng.random() < 0.5
            parts.append(part(index, count, done[index], reason=reasons[index] if ends else None))
            done[index] += count
            if ends:
                open_ones.remove(index)
        errors = [completion.index for completion in parts if completion.finish_reason == "error"]
        found.append(
            output(
                parts,
                finished=not open_ones,
                num_cached_tokens=rng.randint(0, 4),
                prompt_logprobs=None if found else [None, {2: Logprob(-2.0, 1)}],
                error=f"error {errors[0]}" if errors else None,
            )  # fmt: skip
        )
    return found


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """What a reader has in the end, put together without `merged`."""
    completions: dict[int, CompletionOutput] = {}
    for each in outputs:
        for new in each.outputs:
            empty = CompletionOutput(new.index, "", [], logprobs=[], token_sources=[], blocks=[])
            whole = completions.setdefault(new.index, empty)
            whole.text += new.text
            whole.token_ids = whole.token_ids + new.token_ids
            whole.logprobs = (whole.logprobs or []) + (new.logprobs or [])
            whole.token_sources = (whole.token_sources or []) + (new.token_sources or [])
            whole.blocks = (whole.blocks or []) + (new.blocks or [])
            whole.cumulative_logprob = new.cumulative_logprob
            if new.finish_reason is not None:
                whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
    prompts = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
    assert len(prompts) == 1, "they come once"
    errors = [each.error for each in outputs if each.error is not None]
    return output(
        [completions[index] for index in sorted(completions)], finished=outputs[-1].finished,
        num_cached_tokens=max(each.num_cached_tokens for each in outputs), prompt_logprobs=prompts[0],
        error=errors[-1] if errors else None,
    )  # fmt: skip


@pytest.mark.parametrize("pace", [0.0, 0.3, 0.8])
def test_any_pace_of_reading_gives_the_same(pace):
    for seed in range(300):
        check_pace(random.Random(seed), pace)


def check_pace(rng: random.Random, pace: float) -> None:
    sent, mailbox, taken = stream(rng), Mailbox("name"), []
    for each in sent:
        mailbox.put(each)
        if rng.random() < pace:
            taken.append(mailbox.take())
    taken.append(mailbox.take())
    taken = [each for each in taken if each is not None]
    for each in taken:
        assert each.request_id == "name"
        assert all(len(new.logprobs or ()) == len(new.token_ids) for new in each.outputs)
        assert [new.index for new in each.outputs] == sorted({new.index for new in each.outputs})
    assert sum(each.finished for each in taken) == 1 and taken[-1].finished
    ends = [new.index for each in taken for new in each.outputs if new.finish_reason is not None]
    assert len(ends) == len(set(ends)) == len({new.index for each in sent for new in each.outputs})
    assert joined(taken) == joined(sent)


def test_what_was_sent_stays_as_it_was():
    mailbox = Mailbox("name")
    first, then = output([part(0, 2, 0)]), output([part(0, 1, 2, reason="stop")], finished=True)
    mailbox.put(first)
    mailbox.put(then)
    whole = mailbox.take()
    assert whole is not None and whole.outputs[0].token_ids == [0, 1, 2] and whole.outputs[0].stop_reason == 7
    assert first.outputs[0].token_ids == [0, 1] and then.outputs[0].token_ids == [2]
    assert first.outputs[0].text == "<0><1>" and len(first.outputs[0].logprobs or ()) == 2


def test_an_error_comes_after_what_was_there_before_it():
    mailbox = Mailbox("name")
    mailbox.put(output([part(0, 2, 0)]))
    mailbox.fail(RuntimeError("as told"))
    found = mailbox.take()
    assert found is not None and found.outputs[0].token_ids == [0, 1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as told"):
            mailbox.take()
