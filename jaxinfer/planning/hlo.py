"""Facts in a compiled program's text: kernels that it launches, KV that it updates in place, KV that it copies."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

# Instructions that launch nothing: names for memory, control flow (its bodies are counted), ends of what was counted
# at its start.
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier",
    "partition-id", "replica-id", "while", "call", "conditional",
})  # fmt: skip
# A fusion whose result comes from one of these writes a part of its operand in place.
_IN_PLACE = frozenset({"scatter", "dynamic-update-slice"})
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
# XLA may give a sort of longer rows to CUB: of 32-bit numbers in many rows, and in one row.
_LONGEST_OF_MANY, _LONGEST_OF_ONE = 4096, 32768
_SORT_CALL = re.compile(r'custom_call_target="__cub\$')
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class PoolArray:
    """One array of the KV pool, as a program's text names it."""

    dtype: str  # HLO's name: bf16, f16, f32
    shape: tuple[int, ...]  # [num_pages, page_size, num_kv_heads, head_dim]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def is_held_by(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Return whether an array holds the pool's contents, judged by its dimensions: they are the pool's, in any
        order, or with neighbours merged. Weights and activations may have as many elements."""
        if dtype != self.dtype or math.prod(shape) != math.prod(self.shape):
            return False
        strides = set(itertools.accumulate(reversed(self.shape), operator.mul))
        merged = set(itertools.accumulate(reversed(shape), operator.mul)) <= strides
        return merged or sorted(shape) == sorted(self.shape)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # as written: `bf16[4,128]{1,0}`, or a tuple of such
    opcode: str
    arguments: str  # operands and attributes, as written
    is_root: bool

    @property
    def results(self) -> list[tuple[str, tuple[int, ...]]]:
        """Pairs (dtype, shape) of each array of its result."""
        arrays = _ARRAY.findall(re.sub(r"/\*.*?\*/", "", self.shape))
        return [(dtype, tuple(int(size) for size in extent.split(",") if size)) for dtype, extent in arrays]

    def results_like(self, pool: PoolArray) -> list[int]:
        """Return which of its results (0, if it is no tuple) hold an array of the pool."""
        return [index for index, (dtype, shape) in enumerate(self.results) if pool.is_held_by(dtype, shape)]

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments[: _closing(self.arguments)])


class ProgramText:
    """The optimised HLO of a compiled program, read line by line.

    Args:
        text: `jax.stages.Compiled.as_text()`.

    Raises:
        ValueError: it has no entry computation.
    """

    def __init__(self, text: str) -> None:
        self._header = text.partition("\n")[0]
        self.computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if begin := _COMPUTATION.match(line):
                current = self.computations.setdefault(begin[2], [])
                if begin[1]:
                    self._entry = begin[2]
            elif _INSTRUCTION.match(line):
                current.append(_instruction(line))
        if not self._entry:
            raise ValueError("the text of the compiled program has no entry computation")

    @cached_property
    def scheduled(self) -> list[Instruction]:
        """Instructions that the host schedules: the entry's and those of loop bodies, branches and calls, each once."""
        return list(self._reachable(self._entry, set()))

    def kernels(self) -> int:
        """Return how many instructions launch something on the GPU (a fusion, a library call, a copy, ...).

        Each counts as one launch, and a loop's body once: a program that loops, or whose library calls launch several
        kernels, launches more.
        """
        return sum(map(_launches, self.scheduled))

    def kernels_of_branches(self, *scopes: str) -> int:
        """Return how many of `kernels` are in branches of conditionals that were traced in any `jax.named_scope` of
        these."""
        seen: set[str] = set()
        named = re.compile(rf'op_name="[^"]*\b({"|".join(map(re.escape, scopes))})\b')
        called = [
            name
            for i in self.scheduled
            if i.opcode == "conditional" and named.search(i.arguments)
            for name in _called(i)
        ]
        return sum(_launches(i) for name in called for i in self._reachable(name, seen))

    def host_waits(self) -> list[Instruction]:
        """Return the instructions at which a GPU waits for the host to read what comes next, and to launch it.

        They are loops whose number of turns is not known at compile time, and conditionals that hold a loop or a sort
        of long rows, which XLA does not record into a CUDA graph: such a sort becomes a call of CUB. (Seen on an H200,
        with rows of 256 and of 151,936.)
        """
        return [
            i
            for i in self.scheduled
            if (i.opcode == "while" and "known_trip_count" not in i.arguments)
            or (i.opcode == "conditional" and not self._is_recorded(i))
        ]

    def _is_recorded(self, instruction: Instruction) -> bool:
        seen: set[str] = set()
        inner = itertools.chain.from_iterable(self._reachable(name, seen) for name in _called(instruction))
        return not any(i.opcode == "while" or self._sorts(i) for i in inner)

    def _sorts(self, instruction: Instruction) -> bool:
        return any(
            (i.opcode == "sort" and _may_go_to_cub(i)) or (i.opcode == "custom-call" and _SORT_CALL.search(i.arguments))
            for i in self._fused(instruction) or [instruction]
        )

    def _fused(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions of a fusion; none, if it is no fusion."""
        found = re.search(r"\bcalls=%?([\w.\-]+)", instruction.arguments)
        return self.computations[found[1]] if instruction.opcode == "fusion" and found else []

    def kv_alias_bytes(self, pool: PoolArray) -> int:
        """Return the bytes of the arrays of the pool that are arguments and results in the same memory."""
        aliased = {int(number) for number in _ALIAS.findall(self._header)}
        parameters = {
            int(i.arguments.partition(")")[0]): i for i in self.computations[self._entry] if i.opcode == "parameter"
        }
        of_pool = [n for n in aliased if parameters[n].results_like(pool)]
        return len(of_pool) * pool.nbytes

    def kv_copies(self, pool: PoolArray) -> list[Instruction]:
        """Return the instructions that write a whole array of the pool: copies, and all that are no update of it.

        Updates are scatters, dynamic-update-slices and library calls that say that a result aliases an operand; where
        one cannot be in place, XLA puts a copy before it.
        """
        return [
            i
            for i in self.scheduled
            if _launches(i) and i.opcode not in _IN_PLACE and not set(i.results_like(pool)) <= self._in_place(i)
        ]

    def _reachable(self, computation: str, seen: set[str]) -> Iterator[Instruction]:
        if computation in seen:
            return
        seen.add(computation)
        for instruction in self.computations[computation]:
            yield instruction
            if instruction.opcode in ("while", "call", "conditional"):
                for name in _called(instruction):
                    yield from self._reachable(name, seen)

    def _in_place(self, instruction: Instruction) -> set[int]:
        """Return the results that are in the memory of an operand, and of which at most a part is written."""
        if instruction.opcode == "custom-call":
            return set(_aliases(instruction))
        inner = {i.name: i for i in self._fused(instruction)}
        if not inner:
            return set()
        root = next(i for i in inner.values() if i.is_root)
        if root.opcode == "custom-call":  # a library call, fused with slices of its operands
            operands = root.operands
            return {index for index, of in _aliases(root).items() if inner[operands[of]].opcode == "parameter"}
        results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        # A bitcast of a result is that result.
        while any(i.opcode == "bitcast" for i in results):
            results = [inner[i.operands[0]] if i.opcode == "bitcast" else i for i in results]
        return {index for index, i in enumerate(results) if i.opcode in _IN_PLACE}


def _instruction(line: str) -> Instruction:
    begin = _INSTRUCTION.match(line)
    assert begin is not None
    rest = line[begin.end() :]
    # A tuple's shape holds spaces and comments; an array's holds none.
    size = _closing(rest[1:]) + 2 if rest.startswith("(") else rest.index(" ")
    opcode, _, arguments = rest[size:].strip().partition("(")
    return Instruction(begin[2], rest[:size], opcode, arguments, bool(begin[1]))


def _closing(text: str) -> int:
    """Return the index of the parenthesis that closes the one before `text`."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is not closed in {text[:80]!r}")


def _aliases(call: Instruction) -> dict[int, int]:
    """Return result -> operand, for the results of a library call that alias an operand, as it declares."""
    aliases = call.arguments.partition("output_to_operand_aliasing={")[2]
    return {int(index or 0): int(operand) for index, operand in re.findall(r"\{(\d*)\}: \((\d+)", aliases)}


def _may_go_to_cub(sort: Instruction) -> bool:
    shape = sort.results[0][1]
    dimension = re.search(r"\bdimensions=\{(\d+)\}", sort.arguments)
    assert dimension is not None
    length = shape[int(dimension[1])]
    return length > (_LONGEST_OF_MANY if math.prod(shape) > length else _LONGEST_OF_ONE)


def _launches(instruction: Instruction) -> bool:
    return instruction.opcode not in _FREE and not instruction.opcode.endswith("-done")


def _called(instruction: Instruction) -> list[str]:
    names = _CALLED.findall(instruction.arguments)
    for branches in _BRANCHES.findall(instruction.arguments):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names
