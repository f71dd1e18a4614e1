"""The mean over a context's parts: by a launch of its own, or by the last program of ``attend`` to
store its part. Both do the same sums; in the latter their order is that of the parts, whoever is
last."""

# mypy: disable-error-code="assignment"
# Kernels have tuples that grow.

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper, Kernel

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def merge(
    out,
    parts,
    sums,
    part_recent,
    shares,
    places,
    splits,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    SHARES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, SPAN), tl.arange(0, DIM)
    at = part.to(tl.int64) * places + place
    log_sum = tl.load(sums + at, mask=part < splits, other=float("-inf"))
    high = tl.max(log_sum, axis=0)
    base = tl.where(high == float("-inf"), 0.0, high)
    weight = tl.exp2(log_sum - base)
    part_at = parts + at[:, None] * DIM + dims[None, :]
    means = tl.load(part_at, mask=(log_sum > float("-inf"))[:, None], other=0.0)
    total = tl.sum(weight, axis=0)
    if SHARES:
        recent = tl.load(part_recent + at, mask=part < splits, other=float("-inf"))
        share = tl.log2(tl.sum(tl.exp2(recent - base), axis=0)) - tl.log2(total)
        tl.store(shares + place, tl.where(total > 0, share * 0.6931471805599453, 0.0))  # ln(2)
    mean = tl.sum(means * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, mean.to(out.dtype.element_ty))


@Helper
def merge_if_last(
    out,
    parts,
    sums,
    part_recent,
    shares,
    arrived,
    queries,
    first,
    head,
    tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STEP: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Count a program that has stored its part; the last of its lane and tile writes the means.
    Counts are zero before and after."""
    tile, splits = tl.program_id(1), tl.num_programs(2)
    arrived += tl.program_id(0) * tl.num_programs(1) + tile
    # Why the last program sees all parts: the barrier orders the stores of all threads before the
    # atomic of one, which releases them. The last program's atomic on the same counter acquires
    # them, and its threads get the result over another barrier. Loads pass by L1 (.cg), which may
    # hold lines of sums from before a neighbour wrote its part of them.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == splits - 1:
        tl.store(arrived, 0)
        begin = tile * QUERIES
        for query in tl.range(begin, tl.minimum(queries, begin + QUERIES), AT_ONCE, num_stages=1):
            write_means(
                *(out, parts, sums, part_recent, shares),
                *(query, queries, first, head, tokens * HEADS, splits),
                HEADS,
                GROUP,
                DIM,
                AT_ONCE,
                STEP,
                SHARES,
            )


@Helper
def write_means(
    out,
    parts,
    sums,
    part_recent,
    shares,
    query,
    queries,
    first,
    head,
    places,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The means over parts of ``ROWS`` queries from ``query`` on, ``STEP`` parts at a time."""
    places = tl.cast(places, tl.int64)
    query += tl.full([], 0, tl.int32)  # the interpreter's loops count in Python's numbers
    # What a query has one of is a number by itself, so every thread holds it. A tile of them would
    # go through shared memory, behind barriers that keep loads of later parts from starting.
    place, known, high, written, total, near = (), (), (), (), (), ()
    for row in tl.static_range(ROWS):
        token = tl.cast(first + (query + row) // GROUP, tl.int64)
        place += (token * HEADS + head * GROUP + (query + row) % GROUP,)
        known += (tl.where(query + row < queries, splits, 0),)
        high += (tl.full([], float("-inf"), tl.float32),)
        written += (tl.full([], 0, tl.int32),)
        total += (tl.full([], 0.0, tl.float32),)
        near += (tl.full([], 0.0, tl.float32),)
    for start in tl.range(0, splits, STEP, num_stages=1):
        for ahead in tl.static_range(STEP):
            part, highs, ends = start + ahead, (), ()
            for row in tl.static_range(ROWS):
                at, there = place[row] + part * places, part < known[row]
                log_sum = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
                highs += (tl.maximum(high[row], log_sum),)
                # Parts with entries come first. Those behind are not written: they are not read.
                ends += (tl.where(log_sum > float("-inf"), part + 1, written[row]),)
            high, written = highs, ends
    rows, dims = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    base, row_places = (), tl.zeros([ROWS, 1], tl.int64)
    for row in tl.static_range(ROWS):
        base += (tl.where(high[row] == float("-inf"), 0.0, high[row]),)
        row_places = tl.where(rows == row, place[row], row_places)
    mean = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(0, splits, STEP, num_stages=1):
        for ahead in tl.static_range(STEP):
            part, totals, nears = start + ahead, (), ()
            ends, weights = tl.zeros([ROWS, 1], tl.int32), tl.zeros([ROWS, 1], tl.float32)
            for row in tl.static_range(ROWS):
                at, there = place[row] + part * places, part < known[row]
                log_sum = tl.load(sums + at, mask=there, other=float("-inf"), cache_modifier=".cg")
                weight = tl.exp2(log_sum - base[row])
                totals += (total[row] + weight,)
                if SHARES:
                    at = part_recent + at
                    recent = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
                    nears += (near[row] + tl.exp2(recent - base[row]),)
                ends = tl.where(rows == row, written[row], ends)
                weights = tl.where(rows == row, weight, weights)
            at = parts + (row_places + part * places) * DIM + dims
            one = tl.load(at, mask=part < ends, other=0.0, cache_modifier=".cg")
            mean += tl.where(weights > 0, one, 0.0) * weights
            total = totals
            if SHARES:
                near = nears
    norm = tl.full([ROWS, 1], 1.0, tl.float32)
    for row in tl.static_range(ROWS):
        norm = tl.where(rows == row, tl.where(total[row] > 0, total[row], 1.0), norm)
        if SHARES:
            share = (tl.log2(near[row]) - tl.log2(total[row])) * 0.6931471805599453  # ln(2)
            share = tl.where(total[row] > 0, share, 0.0)
            tl.store(shares + place[row], share, mask=known[row] > 0)
    out_at = out + row_places * DIM + dims
    tl.store(out_at, (mean / norm).to(out.dtype.element_ty), mask=query + rows < queries)
