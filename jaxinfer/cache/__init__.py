"""The KV pool and the bookkeeping of its pages."""
