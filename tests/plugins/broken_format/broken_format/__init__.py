"""A package whose hooks are in a module of it."""
