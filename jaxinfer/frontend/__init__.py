"""Prompts to requests, landed tokens to outputs."""
