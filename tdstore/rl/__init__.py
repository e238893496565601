"""Reinforcement learning on the containers: storages of rows, replay buffers, search trees, transitions, scores.

`storages` are tables of a fixed capacity in any backend, `buffers` are replay buffers over them with their
writers and samplers, `trees` are search trees, `transitions` are what agents record, `scores` are how answers of
language models are judged. `import tdstore` does not import this package.
"""
