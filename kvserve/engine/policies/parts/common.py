"""Arguments that several policies have: one name, one meaning, one help text.

A policy lists those it offers, with its own default. What they mean to the engine is in the base
(``query_reduce``) and in ``budgeted`` (``budget``, ``trigger``, ``threshold``).
"""

from __future__ import annotations

from typing import Any

from kvserve.engine.policies.parts.arguments import argument

DEFAULT_GAP = 128
"""Entries between a budget and its threshold."""
MOST_POOLED = 255
MOST_LAYERS = 1024
POOLINGS = ("none", "avg", "max")
LOGGED = ("auto", "model", "fp8", "int4")
ATTENTION = ("window", "absolute")
REMAINDERS = ("off", "mean", "fitted")


def required_budget(help: str, **facts: Any) -> Any:
    """``budget``, where there is no ratio to give instead."""
    return argument(None, f"{help}; required", **{"least": 1, **facts})


def kept_ratio(default: float | None, help: str) -> Any:
    """``ratio``: the exact fraction that is kept."""
    return argument(default, help, fraction=True, note="above 0, at most 1")


def threshold(help: str, **facts: Any) -> Any:
    """``threshold``: entries held when an event is due."""
    help = f"{help} (default budget + {DEFAULT_GAP})"
    return argument(None, help, least=1, above="budget", **facts)


def limit(budget: int, threshold: int | None) -> int:
    """Entries held when an event is due, by these two arguments."""
    return budget + DEFAULT_GAP if threshold is None else threshold


def window(default: int, role: str = "vote", **facts: Any) -> Any:
    """``window``: the newest entries, which are kept and whose queries score the others."""
    help = f"newest entries: always kept, and their queries {role}"
    return argument(default, help, least=1, **facts)


def kernel_size(
    default: int, what: str = "votes are", only_if: tuple[str, ...] = ("pooling avg or max",)
) -> Any:
    """``kernel_size``: neighbours over which scores are pooled."""
    help = f"entries over which {what} pooled"
    return argument(default, help, least=1, most=MOST_POOLED, odd=True, only_if=only_if)


def pooling(default: str, help: str = "how votes are pooled", **facts: Any) -> Any:
    """``pooling``: how neighbours' scores are combined."""
    known = {"choices": POOLINGS, "only_if": ("kernel_size above 1",)}
    return argument(default, help, **{**known, **facts})


def gqa_reduce(default: str | None, choices: tuple[str, ...], more: str = "") -> Any:
    """``gqa_reduce``: how the votes of a KV head's query heads become one."""
    help = "over the query heads of a KV head" + more
    return argument(default, help, choices=choices, only_if=("query_reduce heads",))


def query_reduce(help: str = "which queries are logged") -> Any:
    """``query_reduce``: in which form queries are logged."""
    help = f"{help}: all heads, or the mean over each GQA group"
    return argument("heads", help, choices=("heads", "group_mean"))


def query_dtype(auto: str = "", only_if: tuple[str, ...] = ()) -> Any:
    """``query_dtype``: how a logged number is held; ``auto`` adds to the help on that choice."""
    help = (
        "how queries are logged: in the model's dtype, as fp8 (e4m3, a byte a number), or in 4 "
        "bits with a scale each and what absolute attention needs (int4, all heads); auto is "
        f"{auto}fp8 on a GPU that has it unless the model runs in float32, else the model's dtype"
    )
    return argument("auto", help, choices=LOGGED, only_if=only_if)


def attention(default: str | None, window: str, more: str = "") -> Any:
    """``attention``: what the softmax of a scoring query runs over."""
    help = (
        f"what the softmax of a query runs over: {window} (window), or all that it saw (absolute, "
        f"with query_dtype int4), so that one that looks elsewhere does not vote{more}"
    )
    return argument(default, help, choices=ATTENTION)


def rest_bits() -> Any:
    """``rest_bits``: in how many bits stays what an event does not keep."""
    help = (
        "bits of a number in which what an event does not keep stays, on average (1 to 4 by layer "
        "and KV head, more where blocks have room), read by all later tokens; 0: it is dropped"
    )
    return argument(0.0, help, least=0, most=4, note="0, or at least 1; --kv-cache-dtype 3bit")


def remainder(default: str | None = "off", more: str = "") -> Any:
    """``remainder``: what stands for dropped entries."""
    help = (
        "what stands for dropped entries, in one entry per layer and KV head: nothing (off), or "
        "their mean key and value, with the logarithm of their number added to its logit (mean), "
        "or means by what the observed queries gave each of them, with a weight to match (fitted)"
    )
    return argument(default, help + more, choices=REMAINDERS)
