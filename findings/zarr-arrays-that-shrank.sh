#!/bin/sh
# zarr 3.1.6, tensorstore 0.1.86: an array that is cut short and grows again
# Guess: what was cut off is gone: entries 2 and 3 are the fill value, 0, as in a new array
# Seen: they are back. Only chunks that lie wholly outside are deleted; of the last chunk all that was there stays, and is read again. tensorstore does the same with zarr3, zarr 2 and n5. A cache of entries that is rolled back and grown, and then written with gaps, has the old entries in them; `append` of zarr writes over them
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q zarr==3.1.6 tensorstore==0.1.86 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
import tensorstore
import zarr

seen = {}
array = zarr.create_array("by_zarr", shape=(4,), chunks=(4,), dtype="uint8")
array[:] = [1, 2, 3, 4]
array.resize((2,))
array.resize((6,))
seen["zarr"] = array[:].tolist()
array = zarr.create_array("by_chunks", shape=(4,), chunks=(2,), dtype="uint8")
array[:] = [1, 2, 3, 4]
array.resize((2,))
array.resize((6,))
seen["zarr, chunks of 2"] = array[:].tolist()
for driver in ("zarr3", "zarr", "n5"):
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"by_{driver}/"}}
    layout = tensorstore.ChunkLayout(chunk_shape=[4])
    store = tensorstore.open(spec, create=True, dtype=tensorstore.uint8, shape=[4], chunk_layout=layout).result()
    store[:] = np.array([1, 2, 3, 4], np.uint8)
    store = store.resize(exclusive_max=[2]).result().resize(exclusive_max=[6]).result()
    seen[f"tensorstore {driver}"] = store.read().result().tolist()
print("zarr", zarr.__version__, "1, 2, 3, 4 cut to 2 and grown to 6:", seen)
back, gone = [1, 2, 3, 4, 0, 0], [1, 2, 0, 0, 0, 0]
raise SystemExit(list(seen.values()) != [back, gone, back, back, back])
PYTHON
