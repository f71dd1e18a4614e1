#!/bin/sh
# huggingface_hub 2.4.0, offline: snapshot_download of a model of which the cache has config.json alone
# Guess: it raises LocalEntryNotFoundError, since no weights are there; hf_hub_download of a missing file does
# Seen: it returns the folder as it is, also where allow_patterns names a file that is not in it: whoever fetched only the config gets a checkpoint without weights, and no error
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q huggingface_hub==2.4.0
cd "$work"
cat > offline.py <<'PYTHON'
import os
from pathlib import Path

os.environ.update(HF_HOME=os.path.join(os.getcwd(), "home"), HF_HUB_OFFLINE="1")
folder = Path("home/hub/models--owner--name")
commit = "0123456789" * 4
(folder / "refs").mkdir(parents=True)
(folder / "refs/main").write_text(commit)
(folder / "snapshots" / commit).mkdir(parents=True)
(folder / "snapshots" / commit / "config.json").write_text("{}")

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

seen = [os.listdir(huggingface_hub.snapshot_download("owner/name", allow_patterns=names)) for names in (None, ["model.safetensors"])]
try:
    one = huggingface_hub.hf_hub_download("owner/name", "model.safetensors")
except LocalEntryNotFoundError as error:
    one = type(error).__name__
print(huggingface_hub.__version__, "snapshots, of all files and of model.safetensors:", seen, "| that file alone:", one)
raise SystemExit(seen != [["config.json"]] * 2 or one != "LocalEntryNotFoundError")
PYTHON
"$work/venv/bin/python" offline.py
