"""The method surface of a TensorDict: mixins of small real methods over a few primitives."""
