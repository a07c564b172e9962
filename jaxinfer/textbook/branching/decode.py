"""Branches decoded greedily as SpecSoT does it: one padded rectangle a round, or one sequence under an index map."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.models.decoder import DecoderLM
from jaxinfer.programs.program import TARGET
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.textbook.alignment import AlignmentState
from jaxinfer.textbook.branching.cached_forward import CachedForward
from jaxinfer.textbook.branching.kv_cache import ModelKVCache
from jaxinfer.textbook.branching.state_manager import BranchStateManager
from jaxinfer.textbook.devices import Array

DECODE_MODES = ("padded", "batching", "in_one_sequence")
CAPACITY_STEP = 64


class BranchForward:
    """A model over the branches of a `BranchStateManager`: it computes what the manager prepares, in either mode.

    Attributes:
        manager: the state of the branches; its `cache` is the KV of all of them.
        forward: the model; `forward.shapes` are the rows and columns of every call.
    """

    def __init__(
        self,
        model: DecoderLM | CachedForward,
        prefix: Sequence[int],
        *,
        use_bim_mode: bool,
        num_branches: int,
        capacity: int,
    ) -> None:
        """Compute the shared prefix once; batching mode then copies its KV into `num_branches` rows.

        Args:
            model: a causal decoder.
            prefix: token ids; may be empty.
            use_bim_mode, num_branches, capacity: as for `BranchStateManager`.

        Raises:
            ValueError: the prefix does not fit, or the model's rotary frequencies depend on a prompt's length.
        """
        self.forward = model if isinstance(model, CachedForward) else CachedForward(model)
        self.manager = BranchStateManager(capacity, None, use_bim_mode, num_branches)
        length = len(prefix)
        room = capacity if use_bim_mode else max(length, 1)
        cache = ModelKVCache.allocate(self.forward.config, room, dtype=self.forward.dtype)
        ids, slots = np.asarray(prefix, np.int32)[None], np.arange(length)
        self.forward(cache, ids, slots[None], slots, np.tri(length, dtype=bool)[None])
        self.manager.init_prefix(length, cache)

    def add_branches(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Add branches and compute their prompts; returns logits float32 [vocab] after each prompt.

        Raises:
            ValueError: as `BranchStateManager.add_branch`.
        """
        for branch, prompt in prompts.items():
            self.manager.add_branch(branch, prompt)
        return self._run(self.manager.prepare_prefill_inputs(), prompts)

    def decode(
        self, accepted: Mapping[int, Sequence[int]], joining: Mapping[int, Sequence[int]] | None = None
    ) -> dict[int, np.ndarray]:
        """Compute the tokens that branches have accepted, and the prompts of branches that join in the same round.

        Args:
            accepted: tokens of active branches; the others compute nothing.
            joining: id and prompt of each new branch.

        Returns:
            Logits float32 [vocab] after the latest token of each branch that has computed any.

        Raises:
            ValueError: as `BranchStateManager.prepare_continuous_inputs`; or tokens are of no active branch.
        """
        if unknown := accepted.keys() - set(self.manager.active_branches):
            raise ValueError(f"accepted: {sorted(unknown)}, allowed are the branches {self.manager.active_branches}")
        tokens = [list(accepted.get(branch, ())) for branch in self.manager.active_branches]
        counts = [len(values) for values in tokens]
        if joining:
            inputs = self.manager.prepare_continuous_inputs(counts, tokens, joining)
        else:
            inputs = self.manager.prepare_decode_inputs(counts, tokens)
        return self._run(inputs, {**accepted, **(joining or {})})

    def _run(
        self, inputs: AlignmentState | tuple[Array, Array, Array], tokens: Mapping[int, Sequence[int]]
    ) -> dict[int, np.ndarray]:
        cache = self.manager.cache
        assert isinstance(cache, ModelKVCache)
        active = [branch for branch in self.manager.active_branches if tokens.get(branch)]
        if isinstance(inputs, AlignmentState):
            return self._run_rectangle(cache, inputs, active)
        input_ids, attention_mask, position_ids = map(np.asarray, inputs)
        end = self.manager.current_length
        slots = np.arange(end - input_ids.shape[1], end)
        logits = self.forward(cache, input_ids, position_ids, slots, attention_mask[:, 0] == 0)
        tips = self.manager.branch_tips
        return {branch: logits[0, tips[branch] - slots[0]] for branch in active}

    def _run_rectangle(
        self, cache: ModelKVCache, state: AlignmentState, active: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Run one dense round over every row of the cache; rows of removed branches and of none are padding."""
        rows, (_, width) = list(state.branch_ids), state.input_ids.shape
        ids, positions = np.zeros((2, cache.batch_size, width), np.int32)
        ids[rows], positions[rows] = state.input_ids, state.position_ids
        seen = np.zeros((cache.batch_size, width, state.cache_length), bool)
        seen[rows] = state.query_mask
        slots = np.arange(state.cache_length - width, state.cache_length)
        logits = self.forward(cache, ids, positions, slots, seen)
        return {branch: logits[self.manager.rows[branch], -1] for branch in active}


def decode_branches(
    model: LLM | DecoderLM,
    prefix: Sequence[int],
    branches: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    branch_mode: str = "padded",
    *,
    stop_token_ids: Collection[int] = (),
    max_parallel_branches: int | None = None,
) -> list[list[int]]:
    """Continue `prefix + branch` greedily for every branch; the tokens are the same in every mode.

    "padded" is SpecSoT's batching: a dense rectangle a round, over caches [num_branches, heads, capacity, head_dim]
    into which the prefix is copied for each branch. Short branches are padding beside long ones, and all of them beside
    the prompt of one that joins. The engine's "batching" has ragged rows that share the pages of the prefix: it copies
    and pads nothing. "in_one_sequence" computes all branches as one row. With an `LLM` the engine runs both; a
    `DecoderLM` runs "in_one_sequence" by the objects of this package.

    Args:
        model: an `LLM`, or a causal decoder. "padded" takes an LLM's weights and none of its engine.
        prefix: token ids that all branches share; may be empty for a DecoderLM.
        branches: token ids of each branch after it, at least one.
        max_tokens: most tokens of every branch, or of each.
        branch_mode: "padded", "batching" or "in_one_sequence".
        stop_token_ids: tokens after which a branch ends; they are part of the output. An LLM's end-of-sequence tokens
            end a branch only if they are among them.
        max_parallel_branches: most branches at once; the next one joins when one has ended. None: all.

    Returns:
        New token ids of each branch.

    Raises:
        ValueError: an argument is out of range, or there is no such mode for that kind of model.
    """
    if branch_mode not in DECODE_MODES:
        raise ValueError(f"branch_mode: {branch_mode!r}, allowed are {', '.join(DECODE_MODES)}")
    limits = [max_tokens] * len(branches) if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != len(branches) or min(limits, default=1) < 1:
        raise ValueError(f"max_tokens: {max_tokens}, allowed is a number from 1 on, or one for each of the branches")
    if empty := [i for i, branch in enumerate(branches) if not len(branch)]:
        raise ValueError(f"branches: those at {empty} have no token, allowed is at least one")
    if max_parallel_branches is not None and max_parallel_branches < 1:
        raise ValueError(f"max_parallel_branches: {max_parallel_branches}, allowed are None and numbers from 1 on")
    if isinstance(model, LLM) and branch_mode != "padded":
        params = [
            SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, stop_token_ids=list(stop_token_ids))
            for limit in limits
        ]
        output = model.generate_branches(
            list(prefix), [list(branch) for branch in branches], params, branch_mode,
            max_parallel_branches=max_parallel_branches, use_tqdm=False,
        )  # fmt: skip
        return [list(branch.token_ids) for branch in output.outputs]
    if branch_mode == "batching":
        raise ValueError("branch_mode: 'batching' runs in the engine of an LLM; 'padded' is the batching of the source")
    if isinstance(model, LLM) and model.core.runner.mesh is not None:
        raise ValueError("model: it is sharded over devices, allowed in branch_mode 'padded' is an LLM of one device")
    decoder = model.core.runner.models[TARGET] if isinstance(model, LLM) else model
    if not branches:
        return []
    most = len(branches) if max_parallel_branches is None else max_parallel_branches
    use_bim_mode, lengths = branch_mode == "in_one_sequence", [len(branch) for branch in branches]
    most_positions = decoder.config.max_position_embeddings
    longest_of_all = len(prefix) + max(length + limit for length, limit in zip(lengths, limits, strict=True))
    if longest_of_all > most_positions:
        raise ValueError(
            f"max_tokens: {max_tokens}, a sequence would have {longest_of_all} tokens, allowed are {most_positions}"
        )
    # Branches of one sequence, and those that wait for each other, take slots one after the other.
    longest = sum if use_bim_mode or most < len(branches) else max
    room = len(prefix) + longest(lengths) + longest(limits)
    capacity = -(-room // CAPACITY_STEP) * CAPACITY_STEP  # few sizes, so that few programs are compiled
    run = BranchForward(decoder, prefix, use_bim_mode=use_bim_mode, num_branches=len(branches), capacity=capacity)
    return _greedy(run, branches, limits, frozenset(stop_token_ids), most)


def _greedy(
    run: BranchForward, branches: Sequence[Sequence[int]], limits: Sequence[int], stops: Collection[int], most: int
) -> list[list[int]]:
    """Decode greedily, `most` branches at once."""
    outputs: list[list[int]] = [[] for _ in branches]
    waiting = list(range(len(branches)))
    joining, waiting = waiting[:most], waiting[most:]
    logits = run.add_branches({branch: branches[branch] for branch in joining})
    while logits:
        latest = {branch: int(values.argmax()) for branch, values in logits.items()}
        joining = []
        for branch, token in list(latest.items()):
            outputs[branch].append(token)
            if token in stops or len(outputs[branch]) == limits[branch]:
                run.manager.remove_branch(branch)
                del latest[branch]
                joining, waiting = joining + waiting[:1], waiting[1:]
        if not latest and not joining:
            break
        accepted = {branch: [token] for branch, token in latest.items()}
        logits = run.decode(accepted, {branch: branches[branch] for branch in joining})
    return outputs
