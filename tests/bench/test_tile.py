"""`bench.gpu --tile`: what its batches take of a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_runs import tile
from bench.kernel_rows.cases import SMOKE
from kvserve.kernels import tiles
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from tests.peak_bytes import PeakBytes


@pytest.mark.parametrize("kernel", tile.CANDIDATES)
def test_references_fit_a_gpu(kernel: str) -> None:
    """Inputs and a reference beside each other, of each batch: an H100 has 80 GB."""
    for batch in tile.batches(kernel, "meta"):
        with PeakBytes() as peak:
            batch.reference()
        assert 0 < peak.most < 40e9, f"{batch.name}: {peak.most / 1e9:.0f} GB"


def test_what_is_written_is_the_table_that_it_is_read_from() -> None:
    source = tile.TABLE.read_text()
    assert tile.written(source, tiles.TILES) == source and "longest=2048" in source


@pytest.mark.parametrize("chunk", [20, 1])
def test_a_reference_in_pieces_is_the_same(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "_AT_ONCE", 7)
    given = {}

    def keep(*inputs: object) -> torch.Tensor:
        given["inputs"] = inputs
        return paged_attention_torch(*inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(tile, "paged_attention_triton", keep)
    lengths = [40, 20, 5, 9, 31, 2, 17, 8]
    shape = "smoke", "cpu", SMOKE
    batch = tile.decoding("", lengths, *shape)
    if chunk > 1:
        batch = tile.prefilling("", 2, chunk, *shape)
    torch.testing.assert_close(batch.reference(), batch.run())
