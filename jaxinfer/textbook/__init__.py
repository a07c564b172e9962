"""Published algorithms and objects under the names of their sources; the engine does not import them."""
