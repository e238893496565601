"""Selections of rows and dimensions: parsed, planned, merged. Pure: no I/O."""
