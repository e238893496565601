"""The same small program, run with the `tensordict` package and with tdstore: the results must be equal."""
