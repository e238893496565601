"""Containers: what users hold, over live tensors or over a store."""
