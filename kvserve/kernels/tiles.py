"""Which tiles a program of each Triton kernel takes, by generation of GPU.

`python -m bench.gpu --tile` times candidates on a GPU and rewrites this file. Those here are chosen
by what the compiler says of them: the largest that spill nothing and load the next entries while
the last ones are multiplied (tests/kernels/budget.json holds them to it). On an H100 they read at
.94 of a copy's bandwidth (bench/results/2026-11-26-gpu-h100.json).
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """What one program takes: ``rows`` (queries), ``columns`` (entries), warps, pipeline stages.

    ``programs``: how many a multiprocessor should have when contexts are split to keep all busy.
    ``longest``: a row with more entries is split even if there are enough rows, so that the batch
    does not wait for its longest row (0: never).
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 2
    longest: int = 0


# Two-byte numbers, by the lowest compute capability that has these tiles. With 3 stages the next
# tile of keys and values is under way when one is waited for, and the one after that is asked for
# as soon as it is multiplied. Two warps issue fewer instructions for a tile than four. 12.0 has as
# little shared memory as 8.x.
TILES = {
    (8, 0): {
        "decode": Tile(16, 64, 4, 2),
        "decode codes": Tile(16, 32, 4, 2),
        "decode levels": Tile(16, 32, 1, 3, programs=8, longest=2048),
        "prefill": Tile(64, 64, 8, 2, programs=1),
        "prefill codes": Tile(64, 32, 8, 2, programs=1),
        "scores": Tile(64, 64, 4, 2),
    },
    (9, 0): {
        "decode": Tile(16, 32, 2, 3, programs=5, longest=2048),
        "decode codes": Tile(16, 32, 4, 3),
        "decode levels": Tile(16, 32, 1, 3, programs=12, longest=2048),
        "prefill": Tile(128, 64, 8, 3, programs=1),
        "prefill codes": Tile(128, 32, 8, 2, programs=1),
        "scores": Tile(64, 64, 4, 3),
    },
    (12, 0): {
        "decode": Tile(16, 64, 4, 2),
        "decode codes": Tile(16, 32, 4, 2),
        "decode levels": Tile(16, 32, 1, 3, programs=8, longest=2048),
        "prefill": Tile(64, 64, 8, 2, programs=1),
        "prefill codes": Tile(64, 32, 8, 2, programs=1),
        "scores": Tile(64, 64, 4, 2),
    },
}
# float32 is multiplied exactly, outside of the tensor cores.
FLOAT32_TILES = {
    "decode": Tile(16, 32, 4, 3),
    "decode codes": Tile(16, 16, 4, 3),
    "prefill": Tile(32, 16, 8, 2, programs=1),
    "prefill codes": Tile(32, 16, 8, 2, programs=1),
    "scores": Tile(32, 32, 8, 1),
}
