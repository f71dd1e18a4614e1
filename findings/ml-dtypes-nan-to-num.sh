#!/bin/sh
# ml_dtypes 0.6.0, numpy 2.3.5: numpy's functions that look for NaN, of bfloat16 and float8
# Guess: they see a NaN as np.isnan does: nan_to_num makes 0 of it, nansum and nanmean leave it out, unique puts it last and once
# Seen: numpy looks for NaN in np.inexact types alone, and these are none: nan_to_num gives NaN and inf back as they are, nansum and nanmean of 1, NaN, 3 are NaN, unique leaves 1, NaN, NaN, 1 as it is, with 1 twice; nanmax and fmax do leave it out. The same calls on float16 do as guessed
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import ml_dtypes
import numpy as np

numbers = np.array([1, np.nan, np.nan, 1, np.inf], np.float32)


def seen(kind):
    x = numbers.astype(kind)
    few = x[:4]
    return {
        "nan_to_num": np.nan_to_num(x).astype(float).tolist(),
        "nansum": float(np.nansum(few)),
        "nanmean": float(np.nanmean(few)),
        "nanmax": float(np.nanmax(few)),
        "unique": np.unique(few).astype(float).tolist(),
        "isnan": np.isnan(few).tolist(),
    }


found = {name: seen(kind) for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float8_e5m2", ml_dtypes.float8_e5m2))}
print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__, "of 1, NaN, NaN, 1, inf:", found)
right, wrong = found["float16"], {"nan_to_num": "[1.0, nan, nan, 1.0, inf]", "nansum": "nan", "nanmean": "nan", "nanmax": "1.0", "unique": "[1.0, nan, nan, 1.0]"}
good = right["nan_to_num"][1] == 0 and right["nansum"] == 2 and right["nanmean"] == 1 and len(right["unique"]) == 2
bad = all(str(found[kind][name]) == value for kind in ("bfloat16", "float8_e5m2") for name, value in wrong.items())
raise SystemExit(not good or not bad or found["bfloat16"]["isnan"] != [False, True, True, False])
PYTHON
