"""Locations of a store: folders, objects, memory, zip files; and the redo log of each."""
