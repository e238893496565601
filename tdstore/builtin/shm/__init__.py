"""The parts of the `shared` backend: processes, the arena file, its catalogue, marks, names and sending."""
