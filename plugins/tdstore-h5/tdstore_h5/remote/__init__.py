"""HDF5 files behind a URL, to read."""
