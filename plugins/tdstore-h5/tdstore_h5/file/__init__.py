"""One HDF5 file: its descriptor and lock, its contents, and how it is opened, published and described."""
