"""Replicas of one server under Ray Serve, which starts, scales and routes to them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from jaxinfer.async_llm import AsyncLLM
from jaxinfer.integrations.ray_packages import RequestRouterConfig, connect, gpus_of, is_remote, ray, serve
from jaxinfer.server.app import build_app
from jaxinfer.server.in_process import AsgiRequest, answer
from jaxinfer.server.log import log_to_stderr
from jaxinfer.server.packages import App, Receive, Scope, Send
from jaxinfer.server.service import Service
from jaxinfer.server.settings import ServerSettings

_NAME = "jaxinfer"
ROUTINGS = ("power_of_two", "session", "prefix")
_SESSION = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Its public name is in a package that does not import without another engine.
_PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
_DEFAULT_SEQUENCES = 256
# Characters of a prompt that are compared, and waiting requests from which on the emptier replica is taken instead.
_MOST_CHARACTERS, _MOST_AHEAD = 4096, 16
_PREFIX_OPTIONS = {"imbalanced_threshold": _MOST_AHEAD, "do_eviction": True}
_MANY = 100_000


class Replica:
    """One engine and its endpoints."""

    async def __init__(self, options: Mapping[str, Any], settings: ServerSettings, model: str) -> None:
        if settings.log_requests:
            log_to_stderr()  # Ray shows it
        service = Service(settings, model)
        self._llm = AsyncLLM(**options)
        if settings.warm_up == "full":
            await self._llm.warm_up()
        service.open(self._llm)
        self._app = build_app(service)

    def __serve_build_asgi_app__(self) -> App:
        return self._app

    def check_health(self) -> None:
        """Raise EngineDeadError if this replica has to be replaced."""
        self._llm.check_alive()

    async def answer(self, asked: AsgiRequest) -> AsyncIterator[MutableMapping[str, Any]]:
        """Yield the messages of ASGI that answer a request."""
        async for message in answer(self._app, asked):
            yield message


class Ingress:
    """Deployment that reads bodies, and lets Ray route by what they begin with."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._most = replicas.options(stream=True), max_body_bytes

    def __serve_build_asgi_app__(self) -> App:
        async def forward(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a method for ASGI 2
            await self._forward(scope, receive, send)

        return forward

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, has_more = b"", True
        while has_more and len(body) <= self._most:  # a replica refuses a body that is too large
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, has_more = body + message.get("body", b""), message.get("more_body", False)
        asked = AsgiRequest(scope["path"], scope["method"], scope["query_string"], tuple(scope["headers"]), body)
        messages = self._replicas.answer.remote(replace(asked, prompt=beginning_of(body) or asked.path))
        try:
            async for message in messages:
                await send(message)
        except BaseException:
            messages.cancel()
            raise


def beginning_of(body: bytes) -> str:
    """Return how a request's prompt begins, as text; empty: there is none."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):  # the replica refuses it
        return ""
    if not isinstance(found, dict):
        return ""
    parts = [_text(found.get(name)) for name in ("system", "instructions", "tools", "messages", "prompt", "input")]
    return " ".join(part for part in parts if part)[:_MOST_CHARACTERS]


def _text(value: Any) -> str:
    """Return the text of a prompt or of messages, without names of fields: those would be alike everywhere."""
    match value:
        case str() | int() | float():
            return str(value)
        case list():
            return " ".join(map(_text, value[:_MOST_CHARACTERS]))
        case dict():
            return " ".join(_text(each) for name, each in value.items() if name not in ("role", "type"))
    return ""


def application(
    options: Mapping[str, Any],
    settings: ServerSettings | None = None,
    *,
    model: str = "tiny",
    routing: str = "power_of_two",
    **deployment_options: Any,
) -> Any:
    """Return an application for `ray.serve.run`: replicas of `jaxinfer serve`.

    Args:
        options: of each engine, as `AsyncLLM` takes them.
        settings: of each server; Ray listens in its place.
        model: the name of the model, unless the settings have others.
        routing: "power_of_two": the emptier of two replicas; "session": by a consistent hash of the header
            x-session-id; "prefix": where Ray has sent what begins alike.
        deployment_options: of Ray's deployment of the replicas, as `num_replicas`, `autoscaling_config` or
            `ray_actor_options`.

    Raises:
        ValueError: there is no such routing, or a setting is none of replicas.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    settings = settings or ServerSettings()
    if settings.kv_events_endpoint:
        raise ValueError("events of the prefix cache have one address, and replicas are several: leave out kv_events")
    # A replica itself refuses what is too much: Ray would let it wait without end.
    most = 2 * (options.get("max_num_seqs", _DEFAULT_SEQUENCES) + settings.max_waiting_requests)
    found = {
        "max_ongoing_requests": most, "graceful_shutdown_timeout_s": settings.shutdown_timeout, **deployment_options,
    }  # fmt: skip
    if routing == "session":
        found["request_router_config"] = RequestRouterConfig(request_router_class=_SESSION)
    elif routing == "prefix":
        found["request_router_config"] = RequestRouterConfig(
            request_router_class=_PREFIX, request_router_kwargs=_PREFIX_OPTIONS
        )
    # An application has one deployment that takes HTTP.
    takes_http = routing != "prefix"
    replica = serve.ingress()(Replica) if takes_http else Replica
    replicas = serve.deployment(**found)(replica).bind(dict(options), settings, model)
    if takes_http:
        return replicas
    ingress = serve.deployment(max_ongoing_requests=_MANY, ray_actor_options={"num_cpus": 0})(serve.ingress()(Ingress))
    return ingress.bind(replicas, settings.max_body_bytes)


def run(
    options: Mapping[str, Any],
    settings: ServerSettings,
    *,
    model: str,
    routing: str,
    replicas: int,
    wait: Callable[[], object],
) -> None:
    """Serve replicas on the cluster of RAY_ADDRESS or, without that variable, on this machine alone. Where the cluster
    has GPUs, each replica takes as many as its model is split over.

    Args:
        wait: returns when they are to end.

    Raises:
        ValueError: as for `application`; or others can reach the cluster, and no key is asked for.
    """
    if is_remote() and not (settings.api_keys or settings.allow_unauthenticated):
        raise ValueError("others can reach a cluster: give --api-key, or --allow-unauthenticated")
    connect()
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        gpus = {"ray_actor_options": found} if (found := gpus_of(options)) else {}
        app = application(options, settings, model=model, routing=routing, num_replicas=replicas, **gpus)
        serve.run(app, name=_NAME, route_prefix="/")
        wait()
    finally:
        if is_remote():  # others may have applications there
            serve.delete(_NAME)
        else:
            serve.shutdown()
        ray.shutdown()
