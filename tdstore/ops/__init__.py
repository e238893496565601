"""The methods of a TensorDict: mixins of small explicit methods over a few primitives."""
