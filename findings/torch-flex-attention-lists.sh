#!/bin/sh
# torch 2.13.0, on a CPU: flex_attention without torch.compile and a BlockMask of lists of blocks
# Guess: a query sees what its lists of blocks say, compiled or not: BlockMask.from_kv_blocks, as of a page table or of sparse attention, is the mask
# Seen: without torch.compile the lists are not looked at: mask_mod alone masks, and where it is None, all is seen, though to_dense() shows one block of two; lists of the right blocks and a mask_mod that says the same agree. torch/_higher_order_ops/flex_attention.py, math_attention, uses block_mask[-1], the mask_mod, alone; the page of flex_attention does not say so
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend

torch.manual_seed(0)
q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 8)
counts, blocks = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[0, 1]]]], dtype=torch.int32)
answers = {"first block": attend(q, k[:, :, :4], v[:, :, :4]), "all": attend(q, k, v)}


def seen(mask_mod):
    mask = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=4, mask_mod=mask_mod)
    row = flex_attention(q, k, v, block_mask=mask)
    return mask.to_dense().tolist(), next(name for name, answer in answers.items() if torch.allclose(row, answer, atol=1e-5))


found = [seen(None), seen(lambda b, h, i, j: j < 4)]
print(torch.__version__, "blocks listed, keys seen without and with a mask_mod:", found)
raise SystemExit(found != [([[[[1, 0]]]], "all"), ([[[[1, 0]]]], "first block")])
PYTHON
