"""Rows of columns under a storage: in memory, on a device, or in a store."""
