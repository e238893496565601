"""The tests that the kit asks of every backend."""
