"""Limit on the compiled programs that Linux lets a process map: XLA takes three maps for every kernel on a CPU."""

from __future__ import annotations

from pathlib import Path

_MAPS = Path("/proc/self/maps")
_LIMIT = Path("/proc/sys/vm/max_map_count")
# The largest programs of an engine, rounds for lanes, were seen to take 1,590, whatever the number of layers.
MOST_MAPS_OF_A_PROGRAM = 2000


def num_maps() -> int:
    """Return the number of memory maps of this process; 0 where the system does not tell."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def room_for_programs() -> int:
    """Return how many programs can certainly be compiled before Linux refuses; very many where it has no such limit.

    Raises:
        RuntimeError: there is no room for one. XLA would end the process with "Cannot allocate memory".
    """
    if not _LIMIT.exists():
        return 1_000_000
    limit, maps = int(_LIMIT.read_text()), num_maps()
    room = (limit - maps) // MOST_MAPS_OF_A_PROGRAM
    if room < 1:
        raise RuntimeError(
            f"no room for more compiled programs: this process has {maps} memory maps, and Linux allows {limit}. Raise "
            f"that (as root: sysctl -w vm.max_map_count={4 * limit}), or have fewer shapes compiled with smaller "
            "max_num_seqs, max_num_batched_tokens and max_model_len"
        )
    return room
