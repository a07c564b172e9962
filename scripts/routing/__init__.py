"""Simulated routing of requests to replicas, over the engine's own prefix cache."""
