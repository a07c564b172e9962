"""Scheduling: requests, groups, queues, pages, and the choice of what the next launch runs."""
