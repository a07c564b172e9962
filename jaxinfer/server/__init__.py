"""HTTP: OpenAI's API over `AsyncLLM`. It needs the extra `server`."""
