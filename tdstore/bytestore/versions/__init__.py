"""Versions of the object layout: manifests that stay, and the objects that they name."""
