"""Leaves as cells with checksums, in numbered blocks: layout, plans and fetches."""
