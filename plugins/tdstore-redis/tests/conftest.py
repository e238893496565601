"""Fixtures of this plugin's tests; helpers are in `redishelp`. The server is the root conftest's `redis`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path as FsPath
from typing import Any

import pytest
import torch
from redis import Redis

torch.set_num_threads(1)  # many tests fork, and OpenMP threads do not survive that
sys.path.insert(0, str(FsPath(__file__).parent))

_numbers = itertools.count()


@pytest.fixture
def client(redis: Any) -> Iterator[Redis]:
    """A client of the server that all tests of this worker share, emptied for each."""
    with Redis(port=redis.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def place(client: Redis, redis: Any) -> str:
    """A name of its own."""
    return f"{redis.url}/run {os.getpid()}/{next(_numbers)}"
