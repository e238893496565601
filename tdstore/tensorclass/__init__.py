"""Classes with named fields over a container: `@tensorclass` and `TensorClass`."""
