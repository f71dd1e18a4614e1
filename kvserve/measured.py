"""Chooses a policy from what `kvserve bench frontier` measured of a model and saved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvserve.fields import did_you_mean, number_wanted
from kvserve.folders import cache_folder
from kvserve.log import ConfigError

AUTO_KL = 0.05
"""How far from the full cache `--policy auto` may go, in nats a token, if nothing is said."""


def usual_file(model: str) -> Path | None:
    """Where a model's frontier is saved if no file is named; ``None`` without a home."""
    folder, name = cache_folder(), re.sub(r"[^\w.-]+", "-", str(model)).strip("-")
    return folder and folder / "frontiers" / f"{name}.json"


def chosen(
    file: Path,
    kl: float | None = None,
    of_full: float | None = None,
    speed: float | None = None,
    dtype: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The row of a saved frontier within these bounds: the fastest if ``kl`` is one, else the
    closest to the full cache; and lines that say what was measured. ``ConfigError`` if there is
    none, or if the file is no frontier."""
    try:
        document = json.loads(file.read_text())
        fit = [
            row
            for row in document["rows"]
            if row["policy_args"]
            and row["ratio_to_first"]  # of kvserve, and measured
            and (kl is None or row["kl"] <= kl)
            and (of_full is None or row["of_full"] <= of_full)
            and (speed is None or row["ratio_to_first"] >= speed)
            and (dtype is None or row["kv_cache_dtype"] == dtype)
        ]
        about, machine = document["about"], document["device"]["name"]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is no result of `kvserve bench frontier`") from None
    if not fit:
        raise ConfigError("nothing that was measured is within these bounds; loosen one")
    row = min(fit, key=lambda row: row["kl"] if kl is None else -row["ratio_to_first"])
    facts = f"KL {row['kl']:.4f}, {row['of_full']:.2f} of the full cache's bytes, "
    facts += f"{row['ratio_to_first']:.2f} times its output tokens per second ({machine})"
    return row, [*about, facts]


def automatic(model: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the model's frontier says instead of a ``policy`` that is ``auto`` in flat settings,
    and why, in a sentence.

    ``policy_args`` may have ``kl`` and ``frontier`` (a file). A type of cache that is given is
    kept. Raises ``ConfigError``, above all if nothing was measured.
    """
    args = dict(values.get("policy_args", {}))
    kl, named = args.pop("kl", AUTO_KL), args.pop("frontier", None)
    if args:
        name = next(iter(args))
        close = did_you_mean(name, ("kl", "frontier"))
        raise ConfigError(f"--policy.{name}: auto has kl and frontier alone{close}")
    if (wanted := number_wanted(kl, float, above=0)) is not None:
        raise ConfigError(f"--policy.kl must be {wanted}, got {kl!r}")
    file = usual_file(model) if named is None else Path(str(named))
    if named is None and not (file and file.exists()):
        raise ConfigError(
            f"--policy auto chooses from what was measured of {model}, and nothing was: "
            f"`kvserve bench frontier --model {model}` does, in an hour or so"
        )
    assert file is not None
    dtype = values.get("kv_cache_dtype")
    try:
        row, facts = chosen(file, kl, dtype=dtype)
    except ConfigError as error:
        raise ConfigError(f"--policy auto: {error}") from None
    fields = dict(row["policy_args"])
    setting = {"policy": fields.pop("name"), "policy_args": fields}
    setting["kv_cache_dtype"] = row["kv_cache_dtype"]
    return setting, f"chosen by auto for a KL of at most {kl:g}: {facts[-1]}"
