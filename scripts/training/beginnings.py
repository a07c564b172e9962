"""What a training of the embedded target begins as: nothing, or a checkpoint that learns to use tools as well."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flax import nnx
from transformers import PreTrainedTokenizerFast

from jaxinfer.checkpoint.load import load_checkpoint
from jaxinfer.models.config import ModelConfig
from training.corpus import FURTHER_MIXTURE, MIXTURE, RENAMED_MIXTURE, TOOL_MIXTURE, stream
from training.initialization import CONTEXT, Params, initial_parameters, model_config
from training.loop import TrainingConfig
from training.model_card import read_stages
from training.tokenizer import END_OF_TURN, load_tokenizer, plain_texts, token_ids, train_tokenizer
from training.tool_format import TOOL_CHAT_TEMPLATE

TOKENIZER_SAMPLES = 20_000
WATCHED = ("reading", "repetition", "to_json", "from_json", "arithmetic", "world")
WATCHED_TOOLS = ("tool_call", "tool_calls", "tool_none", "tool_result", "tool_chain")
# What the weights know is to stay: lower rates than from nothing, and a longer way down. Prompts with tools are long,
# and most of what they list is made up, so that their tokens teach little.
CONTINUED = TrainingConfig(
    steps=2000,
    warmup=60,
    decay=0.75,
    matrix_rate=0.01,
    other_rate=2e-3,
    prompt_weight=0.1,
    groups=((8, 128), (4, 256), (2, 512)),
    long_groups=((4, 128), (4, 256), (1, 512), (1, CONTEXT)),
)


@dataclass(frozen=True)
class Beginning:
    """Tokenizer, model and parameters to begin with; what is learned, by which schedule, and the kinds to watch."""

    tokenizer: PreTrainedTokenizerFast
    model: ModelConfig
    graph: nnx.GraphDef
    params: Params
    mixture: Mapping[str, float]
    schedule: TrainingConfig
    watched: tuple[str, ...]


def from_nothing(seed: int) -> Beginning:
    """A new tokenizer, and random parameters with copying heads."""
    samples = itertools.islice(stream(seed), TOKENIZER_SAMPLES)
    tokenizer = train_tokenizer(text for sample in samples for text in plain_texts(sample))
    model = model_config(token_ids(tokenizer, (END_OF_TURN,))[END_OF_TURN])
    graph, params = initial_parameters(model, seed)
    return Beginning(tokenizer, model, graph, params, MIXTURE, TrainingConfig(), WATCHED)


def from_checkpoint(directory: Path) -> Beginning:
    """The weights and the tokenizer of a checkpoint, with a chat template that has tools, which it is to learn, or to
    learn further."""
    tokenizer = load_tokenizer(directory)
    mixtures = (TOOL_MIXTURE, FURTHER_MIXTURE, RENAMED_MIXTURE)
    mixture = mixtures[min(len(read_stages(directory)), len(mixtures)) - 1]
    tokenizer.chat_template = TOOL_CHAT_TEMPLATE
    model, module = load_checkpoint(directory, dtype="float32")
    graph, state = nnx.split(module)
    params = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    return Beginning(tokenizer, model, graph, params, mixture, CONTINUED, WATCHED + WATCHED_TOOLS)
