"""Endpoints, each with what reads its answers."""

from __future__ import annotations

from collections.abc import Callable

from soaking.choices import Reader
from soaking.chunks import ChunkReader
from soaking.message_events import MessageReader
from soaking.response_events import ResponseReader

CONVERSATIONS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

# By the path of the endpoint.
READERS: dict[str, Callable[[], Reader]] = {
    CONVERSATIONS: ChunkReader,
    COMPLETIONS: ChunkReader,
    MESSAGES: MessageReader,
    RESPONSES: ResponseReader,
}
