"""Endpoints for trainers of a model that is served."""

from __future__ import annotations

from jaxinfer.server.bodies import read_body
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import Reply
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.weights import PauseRequest, ResumeRequest, UpdateWeightsRequest
from jaxinfer.server.service import Service


class Weights:
    """Handlers of pauses and updates."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def state(self, request: HttpRequest) -> App:
        llm = self._service.llm
        return Reply({"is_paused": llm.is_paused, "weights_version": llm.weights_version, "why_idle": llm.why_idle})

    async def pause(self, request: HttpRequest) -> App:
        body = await read_body(self._service, request, PauseRequest)
        await self._service.llm.pause_generation(body.mode)
        return await self.state(request)

    async def resume(self, request: HttpRequest) -> App:
        body = await read_body(self._service, request, ResumeRequest)
        await self._service.llm.resume_generation(body.recompute_kv)
        return await self.state(request)

    async def update(self, request: HttpRequest) -> App:
        body = await read_body(self._service, request, UpdateWeightsRequest)
        llm = self._service.llm
        try:
            await llm.update_weights(body.path, body.version, body.model)
        except (ValueError, OSError) as error:
            if llm.why_idle is not None and not llm.is_paused:  # after the first leaf
                raise ApiError(500, f"{error}; {llm.why_idle}", "path") from error
            raise ApiError(400, str(error), "path") from error
        return await self.state(request)
