"""Functions over containers: construct, join, pad, compare, vmap, pytrees."""
