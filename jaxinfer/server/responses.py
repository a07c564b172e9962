"""`/v1/responses`: conversations that the server remembers, and answers that need no client."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from jaxinfer.server.answering import collected, respond
from jaxinfer.server.bodies import read_body
from jaxinfer.server.chat_request import AskedChat, way_of
from jaxinfer.server.envelope import Envelope
from jaxinfer.server.errors import ApiError
from jaxinfer.server.events import Reply, compact
from jaxinfer.server.json_text import loads
from jaxinfer.server.middleware import take_request_id
from jaxinfer.server.packages import App, HttpRequest
from jaxinfer.server.protocol.chat import ChatRequest
from jaxinfer.server.protocol.responses import InputItem, ResponsesRequest
from jaxinfer.server.render import rendered
from jaxinfer.server.response_store import ResponseStore, StoredResponse
from jaxinfer.server.responses_answer import ResponseAnswer, ResponseForm
from jaxinfer.server.responses_request import chat_request, echo_of, in_names_of_responses, listed_items, own_items
from jaxinfer.server.running import Running
from jaxinfer.server.service import Service
from jaxinfer.server.token_texts import TokenTexts

logger = logging.getLogger("jaxinfer.server")

_MOST_ITEMS, _NUM_ITEMS = 100, 20  # of a list
_ORDERS = ("asc", "desc")  # of items, by time
# Parameters of queries, as the OpenAPI document has them.
QUERY_OF_RESPONSE: dict[str, Any] = {
    "stream": {"type": "boolean", "enum": [False], "description": "a response is polled whole"},
}
QUERY_OF_ITEMS: dict[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS, "default": _NUM_ITEMS},
    "order": {"type": "string", "enum": list(_ORDERS), "default": "desc"},
    "after": {"type": "string", "description": "the id of the item before the first one that is listed"},
}


class BackgroundResponse:
    """A response that runs by itself, until it has ended or is cancelled.

    Args:
        stack: closed at the end.
        runs: of the answer, and part of the stack.
    """

    def __init__(self, service: Service, answer: ResponseAnswer, stack: AsyncExitStack, runs: Running) -> None:
        self._answer, self._stack = answer, stack
        self._task = asyncio.create_task(self._run(service, runs))

    async def _run(self, service: Service, runs: Running) -> None:
        async with self._stack:
            try:
                await collected(service, runs, self._answer)
            except asyncio.CancelledError:
                self._answer.cancel()  # kept before it is no longer among those that run
                raise
            except ApiError as error:
                self._answer.failed(error)
            except Exception:
                logger.exception("a response in the background has failed")
                self._answer.failed(ApiError(500, "an internal error, see the server's log"))

    async def cancel(self) -> dict[str, Any]:
        """End it, and return the response: as it is, if it has ended already."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stack.aclose()  # a task that was cancelled before its first step has not closed it
        return self._answer.cancel()


@dataclass
class LiveResponse:
    """A response that has not ended.

    Attributes:
        input: the items of its own input, as JSON.
        background: None: a client waits for it.
    """

    answer: ResponseAnswer
    input: bytes
    background: BackgroundResponse | None = None


class ResponsesEndpoints:
    """Handlers of responses of one service, and the store of them."""

    def __init__(self, service: Service) -> None:
        self._service, settings = service, service.settings
        self._store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
        self._live: dict[tuple[str, str], LiveResponse] = {}

    async def create(self, request: HttpRequest) -> App:
        service = self._service
        body, previous = await self._read(request)
        owner = request.scope["owner"]
        chat, items = await asyncio.to_thread(_conversation, body, previous)
        settings = service.settings
        is_kept = body.store is not False and min(settings.max_stored_responses, settings.max_stored_bytes) > 0
        if body.background:
            if not is_kept:
                raise ApiError(400, "background is not served: this server keeps no responses", "background")
            chat.stream = True  # what is there of the answer is seen by polling
        with _names_of(body):
            asked = await AskedChat.read(service, chat)
            take_request_id(request.scope, chat.request_id)
            way = await way_of(service, request, chat, asked.params)
        name = uuid.uuid4().hex
        given = await asyncio.to_thread(lambda: compact(listed_items(items, name)).encode())

        def ended(response: dict[str, Any]) -> None:
            if is_kept:
                stored = StoredResponse(
                    response["status"], compact(response).encode(), given, previous, bool(body.background)
                )
                self._store.put(owner, response["id"], stored)

        parser = asked.parser()
        form = ResponseForm(
            {"model": service.model_names[0], "store": is_kept, **echo_of(body, asked.params)},
            asked.params.logprobs, None if parser is None else parser(),
            with_reasoning=body.include_reasoning is not False, status="queued" if body.background else "in_progress",
        )  # fmt: skip
        texts = TokenTexts(service.llm.get_tokenizer(), as_ids=bool(chat.return_tokens_as_token_ids))
        envelope = Envelope(name, service.model_names[0], service.fingerprint)
        answer = ResponseAnswer(name, envelope, form, texts, ended)
        running = self._noted(owner, LiveResponse(answer, given) if is_kept else None, body, asked.running(way))
        if not body.background:
            return await respond(service, request, running, answer, is_stream=bool(body.stream))
        stack = AsyncExitStack()
        runs = await stack.enter_async_context(running)
        queued = answer.response()
        self._live[owner, answer.response_id].background = BackgroundResponse(service, answer, stack, runs)
        return Reply(queued)

    async def render(self, request: HttpRequest) -> App:
        body, previous = await self._read(request)
        chat, _ = await asyncio.to_thread(_conversation, body, previous)
        with _names_of(body):
            return Reply(rendered(request, "resp", await AskedChat.read(self._service, chat))[0])

    async def _read(self, request: HttpRequest) -> tuple[ResponsesRequest, StoredResponse | None]:
        """A body, and the response that it continues."""
        body = await read_body(self._service, request, ResponsesRequest)
        self._service.check_model(body.model)
        return body, self._previous(request.scope["owner"], body.previous_response_id)

    @asynccontextmanager
    async def _noted(
        self,
        owner: str,
        live: LiveResponse | None,
        body: ResponsesRequest,
        running: AbstractAsyncContextManager[Running],
    ) -> AsyncIterator[Running]:
        """Run a request, and note what is live as long as it runs."""
        async with AsyncExitStack() as stack:
            with _names_of(body):
                runs = await stack.enter_async_context(running)
            if live is None:
                yield runs
                return
            place = owner, live.answer.response_id
            self._live[place] = live
            try:
                yield runs
            finally:
                del self._live[place]

    def _previous(self, owner: str, response_id: str | None) -> StoredResponse | None:
        """The response that another one continues."""
        if response_id is None:
            return None
        param, is_live = "previous_response_id", self._running(owner, response_id) is not None
        found = None if is_live else self._found(owner, response_id, param)
        if found is None or found.status not in ("completed", "incomplete"):
            status = "in_progress" if found is None else found.status
            raise ApiError(400, f"the previous response cannot be continued: it is {status}", param)
        return found

    def _running(self, owner: str, response_id: str) -> LiveResponse | None:
        """A response that has not ended; what has is kept before its client is told, which may continue it at once."""
        live = self._live.get((owner, response_id))
        return None if live is None or live.answer.has_ended else live

    def _found(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        found = self._store.get(owner, response_id)
        if found is None:
            settings = self._service.settings
            raise ApiError(
                404, f"Response with id '{response_id[:200]}' not found: there was none, it was not stored, or it was "
                f"dropped for later ones (the latest {settings.max_stored_responses} responses and "
                f"{settings.max_stored_bytes} bytes are kept in memory)", param, "response_not_found",
            )  # fmt: skip
        return found

    async def response(self, request: HttpRequest) -> App:
        owner, response_id = _place(request)
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise ApiError(400, "stream is not served here: poll the response whole", "stream")
        live = self._running(owner, response_id)
        return Reply(self._found(owner, response_id).body if live is None else live.answer.response())

    async def cancel(self, request: HttpRequest) -> App:
        owner, response_id = _place(request)
        live = self._running(owner, response_id)
        stored = None if live is not None else self._found(owner, response_id)
        background = live.background if live is not None else None
        if background is not None:
            return Reply(await background.cancel())
        if stored is None or not stored.is_background:
            raise ApiError(400, "Cannot cancel a synchronous response: only those with background=true", "response_id")
        return Reply(stored.body)

    async def delete(self, request: HttpRequest) -> App:
        owner, response_id = _place(request)
        live = self._running(owner, response_id)
        if live is None:
            self._found(owner, response_id)
        elif live.background is None:
            raise ApiError(400, "the response is in progress: close its connection to end it", "response_id")
        else:
            await live.background.cancel()
        self._store.drop(owner, response_id)
        return Reply({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: HttpRequest) -> App:
        owner, response_id = _place(request)
        order = request.query_params.get("order", "desc")
        limit = request.query_params.get("limit", str(_NUM_ITEMS))
        if order not in _ORDERS:
            raise ApiError(400, f"order must be one of {', '.join(_ORDERS)}", "order")
        if not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= _MOST_ITEMS):
            raise ApiError(400, f"limit must be 1 to {_MOST_ITEMS}", "limit")
        live = self._running(owner, response_id)
        text = self._found(owner, response_id).input if live is None else live.input
        after = request.query_params.get("after")
        return Reply(await asyncio.to_thread(_page_of, text, order=order, limit=int(limit), after=after))


@contextmanager
def _names_of(body: ResponsesRequest) -> Iterator[None]:
    """Let errors of the conversation name the fields of a body."""
    try:
        yield
    except ApiError as error:
        raise in_names_of_responses(error, body) from error


def _place(request: HttpRequest) -> tuple[str, str]:
    """The owner of a request's key, and the id of the response that it names."""
    return request.scope["owner"], request.path_params["response_id"]


def _conversation(body: ResponsesRequest, previous: StoredResponse | None) -> tuple[ChatRequest, list[InputItem]]:
    """The conversation that a body continues as a request of chat, and the body's own items of it."""
    items, own = [], own_items(body)
    for each in () if previous is None else previous.conversation():
        answered = [item for item in loads(each.body.decode())["output"] if not _is_cut_call(item)]
        for given in loads(each.input.decode()), answered:
            items += [InputItem.model_validate(item) for item in given]
    return chat_request(body, [*items, *own]), own


def _is_cut_call(item: Mapping[str, Any]) -> bool:
    """Whether an item is a call that its answer's end has cut, which cannot be made."""
    return item["type"] == "function_call" and item["status"] == "incomplete"


def _page_of(text: bytes, *, order: str, limit: int, after: str | None) -> bytes:
    """A page of a list of items, as JSON.

    Args:
        text: the items as JSON, the oldest one first.

    Raises:
        ApiError: there is no item `after`.
    """
    items = loads(text.decode())
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, "after must be the id of an item", "after")
        items = items[place + 1 :]
    shown = items[:limit]
    return compact({
        "object": "list", "data": shown, "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None, "has_more": len(shown) < len(items),
    }).encode()  # fmt: skip
