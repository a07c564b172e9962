"""Metrics of a server in Prometheus' text format: the engine's under its own names and vLLM's, and the server's."""

from __future__ import annotations

import re

from jaxinfer.async_llm import EngineDeadError
from jaxinfer.engine.metrics import escaped_label
from jaxinfer.server.service import DEAD, Service

# Their customary names end in _total at vLLM.
_COUNTER = re.compile(r"^# TYPE (\S+) counter$", re.MULTILINE)


def exposition(service: Service) -> str:
    """Return all metrics. None of their labels has anything of a request, a key or a user."""
    lines = [
        "# TYPE jaxinfer:server_ready gauge",
        f"jaxinfer:server_ready {int(service.is_ready)}",
        "# TYPE jaxinfer:server_requests_running gauge",
        f"jaxinfer:server_requests_running {service.num_running}",
        "# TYPE jaxinfer:server_requests_refused_total counter",
        f"jaxinfer:server_requests_refused_total {service.num_refused}",
        "# TYPE jaxinfer:server_clients_left_total counter",
        f"jaxinfer:server_clients_left_total {service.num_left}",
    ]
    llm = service.loaded
    if llm is None or service.phase == DEAD:
        return "\n".join(lines) + "\n"
    try:
        own = llm.get_metrics().prometheus()
    except RuntimeError as error:  # it is dead, or shut down
        if isinstance(error, EngineDeadError):
            service.die()
        return "\n".join(lines) + "\n"
    return "\n".join(lines) + "\n" + own + _of_vllm(own, service.model_names[0])


def _of_vllm(own: str, model: str) -> str:
    """The engine's metrics under vLLM's names, with its labels."""
    counters = set(_COUNTER.findall(own))
    labels = f'model_name="{escaped_label(model)}",engine="0"'
    found = []
    for line in own.splitlines():
        if line.startswith("#"):
            _, _, name, kind = line.split(" ")
            found.append(f"# TYPE {_name(name, counters)} {kind}")
            continue
        name, value = line.rsplit(" ", 1)
        name, _, given = name.partition("{")
        inside = f"{given[:-1]},{labels}" if given else labels
        found.append(f"{_name(name, counters)}{{{inside}}} {value}")
    return "\n".join(found) + "\n"


def _name(own: str, counters: set[str]) -> str:
    name = "vllm:" + own.removeprefix("jaxinfer:")
    return f"{name}_total" if own in counters and not name.endswith("_total") else name
