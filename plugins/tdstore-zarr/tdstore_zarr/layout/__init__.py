"""Leaves on a grid of chunks, and groups as nodes with documents."""
