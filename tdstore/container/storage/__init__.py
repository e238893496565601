"""Containers over a store: handles, headers, planned changes, growth, copies."""
