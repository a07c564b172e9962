"""Bodies of requests and responses, as data. Nothing here knows the engine."""
