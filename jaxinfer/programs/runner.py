"""The runner holds models and state on the device, and compiles and launches the programs that it is given."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.attention.backend import AttentionBackend
from jaxinfer.attention.tensor_parallel import over_devices
from jaxinfer.cache.kv_pool import KVPool
from jaxinfer.programs.program import (
    BOUNDS,
    KV,
    SEATS,
    TARGET,
    Device,
    OnCompile,
    Place,
    Program,
    everywhere_on,
    sharding_of_logits,
)
from jaxinfer.programs.seats import Seats
from jaxinfer.programs.stand_ins import StandIns
from jaxinfer.programs.weights import ModelWeights, shape_of
from jaxinfer.sampling.bounds import ON_DEFAULT_DEVICE, Bounds, BoundsPlace

logger = logging.getLogger(__name__)


class Runner:
    """Launcher of programs: `launch` returns at once, and reading its results waits for the device.

    Models are flattened once: a call passes their leaves, and modules with arrays exist only while tracing. The parts
    of the state that a program changes are donated to it, and updated in place.

    Models and state of shapes alone (`jax.ShapeDtypeStruct`) make a runner that compiles programs for the device that
    the shapes name, and cannot run them.

    Args:
        lent: of the models, whether a caller holds their arrays too, or of each leaf; by default it does.

    Attributes:
        weights: those of each model, by name.
        state: part -> pytree of arrays on the device, as the latest launch has left it.
        programs: those that an engine can need; others can be launched as well.
        num_stalls: launches that have waited for the compile of their program.
        stand_ins: chooses compiled shapes in the place of others.
        is_shared: whether other processes share the models.
    """

    is_shared = False

    def __init__(
        self,
        models: Mapping[str, Any],
        state: Mapping[str, Any],
        backend: AttentionBackend,
        *,
        programs: Sequence[Program] = (),
        mesh: Mesh | None = None,
        on_compile: OnCompile = lambda program: None,
        lent: Mapping[str, bool | Sequence[bool]] | None = None,
    ) -> None:
        self.weights = {name: ModelWeights(model, lent=(lent or {}).get(name, True)) for name, model in models.items()}
        self.mesh, self.programs = mesh, list(programs)
        self.state = dict(state)
        self._backend, self._on_compile = over_devices(backend, mesh), on_compile
        # Programs are compiled for these shapes, whatever launches do to the arrays meanwhile.
        self._abstract_state = jax.tree.map(shape_of, self.state)
        self._executables: dict[tuple[Program, Any], Any] = {}
        self.stand_ins = StandIns(self._executables.keys())
        self.num_stalls = 0
        self._compiling: defaultdict[tuple[Program, Any], threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        self._outcome: tuple[dict[str, Any], Any] | None = None
        self._seats_before: Any = None  # while lengths are set

    @property
    def models(self) -> dict[str, Any]:
        """The models, with shapes in the place of arrays."""
        return {name: weights.shapes for name, weights in self.weights.items()}

    def set_model(self, name: str, model: Any) -> None:
        """Set the model that programs read under that name from now on, of the same shapes as before."""
        self.weights[name] = ModelWeights(model, lent=True)

    @property
    def place(self) -> Place:
        """State sizes and shardings, which the inputs of programs depend on besides shapes."""
        kv, token, target = self._abstract_state[KV], self._abstract_state[SEATS].token, self.weights[TARGET].shapes
        whole = everywhere_on(self.mesh)
        split = sharding_of_logits(self.mesh, target.config.vocab_size)
        if isinstance(self.state[SEATS].token, jax.ShapeDtypeStruct) and self.mesh is None:
            whole = split = token.sharding
        return Place(kv.num_slots, token.shape[0], target, whole, split)

    def launch(self, program: Program, shape: Any, *inputs: Any) -> Any:
        """Launch a program, and return its results, which the device may still be computing."""
        executable = self.ready(program, shape)
        # Never a local variable: the frames of a traceback would keep a pool alive, and `salvage` could not reach it.
        self._outcome = executable(
            self._leaves_of(program), {name: self.state[name] for name in program.writes}, inputs
        )
        assert self._outcome is not None
        self.state.update(self._outcome[0])
        results, self._outcome = self._outcome[1], None
        return results

    def ready(self, program: Program, shape: Any) -> jax.stages.Compiled:
        """Return a program that is about to be launched, compiled now if it was not before."""
        found = self._executables.get((program, shape))
        if found is None:
            self.num_stalls += 1
            found = self.compile(program, shape)
        return found

    def salvage(self, make_state: Callable[[], Mapping[str, Any]]) -> None:
        """Restore the state after a launch that was interrupted or has failed: take over its results, and make lost
        parts anew, once the device holds none of them.

        Args:
            make_state: makes all parts.
        """
        if self._outcome is not None:
            self.state.update(self._outcome[0])
            self._outcome = None
        if lost := [name for name, part in self.state.items() if not _is_whole(part)]:
            self._remake(lost, make_state)

    def _remake(self, lost: Sequence[str], make_state: Callable[[], Mapping[str, Any]]) -> None:
        """Make parts of the state anew, once the device holds none of them."""
        for name in lost:
            self.state[name] = None
        for name in lost:
            self.state[name] = make_state()[name]

    def drop_state(self) -> None:
        """Delete all parts of the state."""
        for part in self.state.values():
            for leaf in jax.tree.leaves(part):
                if not leaf.is_deleted():
                    leaf.delete()

    def set_lengths(self, length: int) -> None:
        """Give all seats this length, on the device, until `restore_seats`. For an engine without requests."""
        self._seats_before = self.state[SEATS]
        self.state[SEATS] = jax.block_until_ready(self._seats_before.with_lengths(length))

    def restore_seats(self) -> None:
        """Put the seats back that `set_lengths` has replaced."""
        self.state[SEATS], self._seats_before = self._seats_before, None

    def check_alone(self, what: str) -> None:
        """Raise RuntimeError if other processes share the model: they would have to do `what` too."""
        if self.is_shared:
            raise RuntimeError(f"{what} is not possible while several processes share the model")

    def launch_idle(self, program: Program, shape: Any) -> Any:
        """Run a program on padding: it compiles, and changes nothing."""
        inputs = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x,
            program.idle(shape, self.place),
        )
        # Not that of a subclass, for which padding is no launch like others.
        return Runner.launch(self, program, shape, *inputs)

    def compile(self, program: Program, shape: Any) -> jax.stages.Compiled:
        """Return the compiled program, which is compiled once; nothing runs, and models and state may be abstract.

        Any thread may call this: one that needs a program that another one is compiling waits for it. The parts of the
        state keep their shardings, so each launch finds what the program is compiled for.
        """
        key = program, shape
        with self._lock:
            compiling = self._compiling[key]
        with compiling:
            found = self._executables.get(key)
            if found is None:
                self._on_compile(program.describe(shape))
                # Not as they are now: they may sleep on the host.
                leaves = {name: self.weights[name].wanted for name in program.reads}
                state = {name: self._abstract_state[name] for name in program.writes}
                inputs = program.idle(shape, self.place)
                found = self._executables[key] = (
                    self._jitted(program, shape, state).lower(leaves, state, inputs).compile()
                )
        return found

    def _leaves_of(self, program: Program) -> dict[str, list[Any]]:
        return {name: self.weights[name].leaves for name in program.reads}

    def _jitted(self, program: Program, shape: Any, state: Any) -> Any:
        @partial(jax.jit, donate_argnames="state", out_shardings=({name: _places(state[name]) for name in state}, None))
        def run(leaves: dict[str, list[jax.Array]], state: dict[str, Any], inputs: tuple[Any, ...]):
            models = {name: self.weights[name].module_of(values) for name, values in leaves.items()}
            return program.run(Device(models, state, self._backend, self.mesh), shape, *inputs)

        return run


def _places(part: Any) -> Any:
    """Return the shardings of the arrays of a part of the state; None: some have none."""
    places = jax.tree.map(lambda x: x.sharding, part)
    return places if all(x.sharding is not None for x in jax.tree.leaves(part)) else None


def _is_whole(part: Any) -> bool:
    """Return whether every array of a part of the state is there, once the device has computed it."""
    leaves = jax.tree.leaves(part)
    if not leaves or any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception as error:  # all results of a failed launch raise its error
        logger.warning("a part of the device's state is lost: %s", error)
        return False
    return True


def initial_state(
    kv: KVPool, num_seats: int, vocab_size: int, place: BoundsPlace = ON_DEFAULT_DEVICE
) -> dict[str, Any]:
    """Return the state of a plain engine: its pool, and empty seats that bind nothing; shapes only if the pool is.

    Args:
        place: shardings of seats and bounds.
    """
    if kv.is_abstract:
        seats = Seats.shapes(num_seats, place.whole)
        bounds = Bounds.shapes(num_seats, vocab_size, place)
    else:
        seats = Seats.allocate(num_seats, place.whole)
        bounds = Bounds.allocate(num_seats, vocab_size, place)
    return {KV: kv, SEATS: seats, BOUNDS: bounds}
