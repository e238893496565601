"""Work on a container by several processes: `map`, and collectives of `torch.distributed`."""
