"""Parameters of torch.nn modules as TensorDicts."""
