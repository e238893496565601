"""Imported last by a server of forks: what every process does once, so that no fork does it while it is measured."""

import gc

import torch

torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged)  # torch imports sympy for the first one: 0.4 s
gc.collect()
gc.freeze()  # a fork looks through what it made itself only
