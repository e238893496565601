"""The `memmap` backend: a folder with one file per leaf, mapped."""
