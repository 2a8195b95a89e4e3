"""A shuffled order that is computed, not stored: position -> row, in bounded memory, for any number of rows.

Written out here because it must never change: a run resumes by it, on whatever version of numpy it then finds. Few rows are
sorted by a hash. For many rows a Feistel network is used, a bijection on 2^k numbers whatever its round function is; positions
that land outside the wanted range are sent through again (cycle walking) until they fall inside, which keeps it a bijection on
exactly that range.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
SORTED_BELOW = 1 << 16  # a Feistel network's halves must have some bits each to shuffle well


def permuted(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a shuffle of ``range(size)`` named by ``(seed, epoch)`` sends each of ``positions``."""
    if size <= SORTED_BELOW:
        return _sorted_by_hash(size, seed, epoch)[positions]
    # Two unequal halves allowed: the domain is then less than twice the range, and walks stay short.
    bits = (size - 1).bit_length()
    low = np.uint64(bits // 2)
    low_mask = np.uint64((1 << int(low)) - 1)
    high_mask = np.uint64((1 << (bits - int(low))) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    current = positions.astype(np.uint64)
    walking = np.arange(len(current))
    while len(walking):
        left, right = current[walking] >> low, current[walking] & low_mask
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = left ^ (_mixed(right, key) & high_mask)
            else:
                right = right ^ (_mixed(left, key) & low_mask)
        current[walking] = (left << low) | right
        walking = walking[current[walking] >= np.uint64(size)]
    return current.astype(np.int64)


@lru_cache(maxsize=4)
def _sorted_by_hash(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    key = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
    return np.argsort(_mixed(np.arange(size, dtype=np.uint64), key), kind="stable").astype(np.int64)


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit. Wrapping is meant."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
