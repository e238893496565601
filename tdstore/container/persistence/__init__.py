"""Methods that save, consolidate and grow a container, and those named after backends."""
