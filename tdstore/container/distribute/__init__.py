"""Work on a container by several processes: `map`, `build`, and collectives of `torch.distributed`."""
