"""Distillation (Hinton et al. 2015): a small model learns the whole distributions of a trained one, on its answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import PreTrainedTokenizerFast

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import DecoderLM
from training.corpus import Sample, stream
from training.initialization import Params, random_parameters
from training.loop import hidden_of, module_of, weights_of_next
from training.packing import Document, Rows
from training.tokenizer import encode_document

TEMPERATURES = (0.0, 0.8, None, 0.0, 0.8)
"""Of one sample after the other, the temperature at which the teacher answers; None: the corpus has the answer."""
MAX_TOKENS = 320
AT_ONCE = 1000
HELD_OUT_SEED = 9


@dataclass(frozen=True)
class TaughtRows(Rows):
    """Rows with the teacher's last hidden state at each token, float16 [rows, length, hidden]: an eighth of the numbers
    of its distributions, which are computed from it again."""

    teacher: np.ndarray


def first_layers(config: ModelConfig, model: DecoderLM, count: int) -> tuple[ModelConfig, nnx.GraphDef, Params]:
    """What a student begins as: the teacher without its later layers, as configuration, graph and parameters."""
    shorter = replace(config, num_layers=count)
    graph, params = random_parameters(shorter, 0)
    taught = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    return shorter, graph, {name: jnp.array(taught[name]) for name in params}


def own_answers(llm: LLM, samples: list[Sample], params: list[SamplingParams]) -> list[RequestOutput]:
    """What the model itself answers at the end of each conversation."""
    return llm.chat([sample.prompt for sample in samples], params, use_tqdm=False)


def with_own_answers(
    llm: LLM, tokenizer: PreTrainedTokenizerFast, samples: list[Sample], temperatures: list[float | None]
) -> list[Document]:
    """Documents of conversations whose last answer is the model's own at the given temperature. Where that is None,
    and in plain texts, all is the corpus's."""
    answered = [
        (i, SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS))
        for i, (sample, temperature) in enumerate(zip(samples, temperatures, strict=True))
        if sample.messages and temperature is not None
    ]
    documents = [Document(*encode_document(tokenizer, sample)) for sample in samples]
    outputs = own_answers(llm, [samples[i] for i, _ in answered], [params for _, params in answered])
    for (i, _), output in zip(answered, outputs, strict=True):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        written = documents[i].written[: len(prompt)] + [True] * len(answer)
        documents[i] = Document(prompt + answer, written)
    return documents


def by_turns(number: int, sample: Sample) -> float | None:
    """The temperature of the answer to a sample, the `number`th of the stream."""
    return TEMPERATURES[number % len(TEMPERATURES)]


def own_documents(
    llm: LLM,
    tokenizer: PreTrainedTokenizerFast,
    samples: Iterator[Sample],
    temperature_of: Callable[[int, Sample], float | None] = by_turns,
) -> Iterator[Document]:
    """The stream `with_own_answers`, as long as it is."""
    while chunk := list(itertools.islice(samples, AT_ONCE)):
        temperatures = [temperature_of(number, sample) for number, sample in enumerate(chunk)]
        yield from with_own_answers(llm, tokenizer, chunk, temperatures)


def kept_documents(stream: Iterator[Document], count: int, file: Path) -> list[Document]:
    """So many of a stream, from `file` if there are as many, and else written there."""
    if file.exists():
        found = [Document(*fields) for fields in json.loads(file.read_text(encoding="utf-8"))]
        if len(found) >= count:
            return found[:count]
    documents = []
    for document in itertools.islice(stream, count):
        documents.append(document)
        if len(documents) % 1000 == 0:
            print(f"{len(documents):6d} of {count} texts", flush=True)
    file.write_text(json.dumps([(each.ids, each.written) for each in documents]) + "\n", encoding="utf-8")
    return documents


def held_out_answers(llm: LLM, count: int) -> list[Document]:
    """Conversations that training never sees, with the model's greedy answer, which alone counts as written."""
    samples = list(itertools.islice((each for each in stream(HELD_OUT_SEED, held_out=True) if each.messages), count))
    outputs = own_answers(llm, samples, [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)] * count)
    pairs = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    return [Document(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs]


def make_teacher(model: DecoderLM) -> Callable[[Rows], TaughtRows]:
    """A function that adds to rows what the model would say after each token."""

    @jax.jit
    def hidden(model: DecoderLM, rows: dict[str, jax.Array]) -> jax.Array:
        return hidden_of(model, rows).reshape(*rows["ids"].shape, -1).astype(jnp.float16)

    def teach(rows: Rows) -> TaughtRows:
        arrays = rows.arrays()
        return TaughtRows(**arrays, teacher=np.asarray(hidden(model, arrays)))

    return teach


def divergences(
    graph: nnx.GraphDef, words: jax.Array, params: Params, rows: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the divergences KL(teacher || student) of the next tokens' distributions in nats, and the sum of
    the weights. `words` [vocab, hidden] is the teacher's output head."""
    said, wanted, weights = _distributions(graph, words, params, rows)
    return jnp.sum(jnp.sum(jnp.exp(wanted) * (wanted - said), axis=-1) * weights), jnp.sum(weights)


def agreements(
    graph: nnx.GraphDef, words: jax.Array, params: Params, rows: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Like `divergences`, but the weights of tokens after which both find the same token most likely."""
    said, wanted, weights = _distributions(graph, words, params, rows)
    return jnp.sum((jnp.argmax(said, axis=-1) == jnp.argmax(wanted, axis=-1)) * weights), jnp.sum(weights)


def _distributions(
    graph: nnx.GraphDef, words: jax.Array, params: Params, rows: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probabilities [rows * length, vocab] of student and teacher, and the weights of the tokens."""
    student = module_of(graph, params)
    said = student.logits(hidden_of(student, rows))  # pyright: ignore[reportAttributeAccessIssue]
    wanted = jnp.einsum("th,vh->tv", rows["teacher"].reshape(-1, words.shape[1]).astype(words.dtype), words)
    return jax.nn.log_softmax(said), jax.nn.log_softmax(wanted), weights_of_next(rows)


def repeated(lessons: list[list[Rows]], seed: int) -> Iterator[list[Rows]]:
    """The groups of rows of each step again and again, in another order each time."""
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(lessons)):
            yield lessons[index]
