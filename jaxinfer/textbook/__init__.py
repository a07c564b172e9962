"""Published algorithms and objects under the names of their sources; the engine imports none of it."""
