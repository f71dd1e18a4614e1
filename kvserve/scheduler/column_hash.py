"""Chained hashes of block columns: each identifies all tokens up to its end, and their salt."""

from __future__ import annotations

import hashlib

import numpy as np

from kvserve.scheduler.arrays import IntArray

SEED = b"kvserve"


def salted_seed(salt: str) -> bytes:
    """Seed of the hashes of sequences that share columns only under the same ``salt``."""
    return hashlib.blake2b(salt.encode(), digest_size=16, key=SEED).digest()


def column_hashes(
    token_ids: IntArray, block_size: int, known: list[bytes], seed: bytes = SEED
) -> list[bytes]:
    """Chained hashes of all full columns; ``known`` are those of the first ones."""
    hashes = list(known)
    tokens = np.ascontiguousarray(token_ids, np.int32)
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else seed
        digest = hashlib.blake2b(parent, digest_size=16)
        digest.update(tokens[start : start + block_size].tobytes())
        hashes.append(digest.digest())
    return hashes
