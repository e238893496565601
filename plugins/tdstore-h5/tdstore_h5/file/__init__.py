"""One HDF5 file: its descriptor and lock, what is in it, how it is opened, published and described."""
