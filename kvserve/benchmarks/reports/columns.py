"""Titles of the figures in tables, the same in every command."""

from __future__ import annotations

from kvserve.benchmarks.reports.report import Column

_COLUMNS = {
    column.key: column
    for column in (
        Column("task", "task", left=True),
        Column("pool", "pool_blocks", ",d"),
        Column("of the demand", "pool_share", ".2f"),
        Column("max seqs", "max_num_seqs", "d"),
        Column("policy", "policy", left=True),
        Column("retention", "retention", "g"),
        Column("cache held in", "kv_cache_dtype", left=True),
        Column("prefix caching", "prefix_caching", left=True),
        Column("speculation", "speculation", left=True),
        Column("guessed", "draft_tokens", ",d"),
        Column("of these right", "accepted_share", ".0%"),
        Column("output tokens", "output_tokens", ",d"),
        Column("wall s", "wall_s", ".2f"),
        Column("output tok/s", "output_tok_s", ",.1f"),
        Column("of all runs", "spread"),
        Column("vs first", "ratio_to_first", ".2f"),
        Column("of all runs", "ratio_spread"),
        Column("mean running", "mean_running", ".1f"),
        Column("peak", "peak_running", "d"),
        Column("pool in use", "mean_pool_usage", ".0%"),
        Column("held/logical", "held_over_logical", ".2f"),
        Column("held/logical at end", "held_over_logical_at_end", ".3f"),
        Column("bytes per sequence, mean", "mean_held_bytes", ",.0f"),
        Column("bytes of blocks at end", "allocated_bytes_at_end", ",.0f"),
        Column("blocks released", "blocks_released", ",d"),
        Column("events", "compactions", ",d"),
        Column("early", "early_compactions", ",d"),
        Column("evicted", "evicted_tokens", ",d"),
        Column("preemptions", "preemptions", ",d"),
        Column("swaps", "swaps", ",d"),
        Column("turns that went on", "resumed_turns", ",d"),
        Column("prompt cached", "prompt_cached", ".0%"),
        Column("steps", "steps", ",d"),
        Column("itl p50 ms", "itl_p50_ms", ".1f"),
        Column("itl p99 ms", "itl_p99_ms", ".1f"),
        Column("exact match", "exact_match", ".3f"),
        Column("±", "exact_match_error", ".3f"),
        Column("95% interval", "interval_95", lambda bounds: "{:.3f}–{:.3f}".format(*bounds)),
        Column("correct prefix", "correct_prefix", ".3f"),
        Column("score", "score", ".3f"),
        Column("text", "text", left=True),
        Column("of the full cache", "of_full", ".3f"),
        Column("at the end", "of_full_at_end", ".3f"),
        Column("KL", "kl", ".4f"),
        Column("±", "kl_error", ".4f"),
        Column("NLL lost", "nll_lost", "+.4f"),
        Column("±", "nll_lost_error", ".4f"),
        Column("same first choice", "same", ".3f"),
        Column("facts found", "facts", ".2f"),
        Column("events", "events_per_text", ".1f"),
        Column("n", "n", "d"),
        Column("answers each", "answers_each", "d"),
        Column("seed", "seed", "d"),
        Column(
            "events per request",
            "compactions_per_request",
            lambda mean: f"{mean:.2f}" if mean else "never reached",
        ),
        Column("ms an event", "event_ms", ".2f"),
    )
}


def columns(*keys: str) -> tuple[Column, ...]:
    """The columns of these figures, in this order; tables leave out columns without any value."""
    return tuple(_COLUMNS[key] for key in keys)
