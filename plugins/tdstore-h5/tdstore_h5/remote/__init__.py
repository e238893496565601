"""Read-only HDF5 files behind a URL."""
