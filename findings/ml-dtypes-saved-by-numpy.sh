#!/bin/sh
# ml_dtypes 0.6.0 with numpy 2.3.5: np.save and np.issubdtype of bfloat16, float8 and int4
# Guess: np.load gives back the type that was saved; a bfloat16 is np.floating, an int4 np.integer, as float16 and int8 are
# Seen: np.load gives raw bytes of that width, |V2 or |V1, with no word of the type, and so does np.savez: .view(bfloat16) gets them back for who knows what they were; int4 takes a byte. np.issubdtype says False, so code that asks for floats takes them for something else
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q ml_dtypes==0.6.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import io

import ml_dtypes
import numpy as np

seen = {}
for kind, family in ((ml_dtypes.bfloat16, np.floating), (ml_dtypes.float8_e4m3fn, np.floating), (ml_dtypes.int4, np.integer), (np.float16, np.floating)):
    single, archive = io.BytesIO(), io.BytesIO()
    np.save(single, np.ones(2, kind))
    np.savez(archive, x=np.ones(2, kind))
    single.seek(0)
    archive.seek(0)
    loaded = np.load(single), np.load(archive)["x"]
    seen[kind.__name__] = *(x.dtype.str for x in loaded), loaded[0].view(kind).astype(float).tolist(), np.issubdtype(kind, family)
print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__, "loaded as, from an archive, viewed, a float or an integer:", seen)
wanted = {"bfloat16": ("|V2", "|V2"), "float8_e4m3fn": ("|V1", "|V1"), "int4": ("|V1", "|V1")}
same = all(seen[name] == (*kinds, [1.0, 1.0], False) for name, kinds in wanted.items())
raise SystemExit(not same or seen["float16"] != ("<f2", "<f2", [1.0, 1.0], True))
PYTHON
