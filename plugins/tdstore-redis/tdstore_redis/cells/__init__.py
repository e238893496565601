"""Leaves as cells with checksums, in numbered blocks."""
