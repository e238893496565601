"""Rows of datasets: reads, writes in place, undo, checksums."""
