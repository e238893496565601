"""Tables of a fixed number of rows, filled by writers and read by samplers, in the memory or in any backend."""
