"""Find a checkpoint: one that ships, a directory, a GGUF file, or a hub id; and read its config."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvserve.engine.models.counts import Held, check_counts, held_in
from kvserve.fields import did_you_mean
from kvserve.late import Late
from kvserve.log import ConfigError

_DATA = Path(__file__).parents[2] / "data"
SHIPPED_MODELS = {f"kvserve/{name}": _DATA / name for name in ("tiny", "tiny-long")}
_SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
# The same weights once more, in their authors' own formats.
_DUPLICATES = ("consolidated*", "original/*")
QUERY_STATISTICS = "triattention.stats"
"""Query statistics of this name beside a model are taken if no others are named. It does not end in
.safetensors: other engines read every such file of a folder as weights."""

LOADING = threading.RLock()
"""Held while a model or a tokenizer loads: transformers imports its modules when they are first
used, and threads that do so at once see half of one."""


class Source(NamedTuple):
    """How a model in one file is read, from its path: fields of config.json and the shapes of all
    tensors, fields of generation_config.json, transformers' tokenizer, a ``Checkpoint``."""

    config: Late
    sampling: Late
    tokenizer: Late
    tensors: Late


SOURCES = {
    ".gguf": Source(
        Late("engine.gguf.config:config_of"),
        Late("engine.gguf.config:sampling_of"),
        Late("engine.gguf.tokenizer:gguf_tokenizer"),
        Late("engine.gguf.tensors:GgufTensors"),
    )
}
"""By the end of the file's name; a directory has safetensors and tokenizer.json."""


def find_model(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    load_format: str = "auto",
    weights: bool = True,
    code: bool = False,
    flag: str = "--model",
) -> Path:
    """A checkpoint's directory or GGUF file; ``ConfigError`` says in one line why ``flag`` names
    none.

    A directory with one GGUF file stands for that, unless ``load_format`` or what else is there
    says otherwise; a name of ``FETCHABLE`` stands for what was fetched. A hub id is downloaded to
    ``download_dir`` or to the cache that HF_HOME names, without the weights or with Python files if
    so asked. HF_HUB_OFFLINE, HF_TOKEN and HF_ENDPOINT are obeyed.
    """
    if (path := local_model(name, load_format=load_format, flag=flag)) is not None:
        return path
    patterns = [*_SMALL_FILES, *["*.safetensors"] * weights, *["*.py"] * code]
    try:
        from huggingface_hub import snapshot_download

        fetched = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=list(_DUPLICATES),
        )
        return Path(fetched)
    except Exception as error:  # any error of the network, the disk or the hub
        raise ConfigError(f"{flag}: {_problem(error, name, revision, download_dir)}") from None


def local_model(name: str, *, load_format: str = "auto", flag: str = "--model") -> Path | None:
    """As ``find_model``, of what is on this machine; ``None``: the name is a hub id."""
    if name in SHIPPED_MODELS:
        return SHIPPED_MODELS[name]
    path = Path(name).expanduser()
    if path.is_dir():
        path = _gguf_in(path, load_format, flag) or path
    else:
        from kvserve.engine.models.fetched import FETCHABLE, fetched_file

        if name in FETCHABLE:
            path = fetched_file(name)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if load_format in ("gguf", "safetensors") and is_gguf != (load_format == "gguf"):
        what = "is one" if is_gguf else "is no GGUF file, and has none in it"
        raise ConfigError(f"--load-format {load_format}: {name} {what}; leave it at auto")
    if is_gguf or path.is_dir():
        return path
    no_id = path.is_absolute() or name.count("/") != 1 or name[0] == "."
    if no_id or path.suffix == ".gguf" or name.startswith("kvserve/"):
        known = [*SHIPPED_MODELS, *FETCHABLE]
        raise ConfigError(
            f"{flag}: {name} is neither a directory, a .gguf file nor a hub id (owner/name)"
            f"{did_you_mean(name, known)}"
        )
    return None


def _gguf_in(directory: Path, load_format: str, flag: str) -> Path | None:
    """The GGUF file that a directory stands for, if it does."""
    found = sorted(f for f in directory.glob("*.gguf") if not f.name.startswith("mmproj"))
    others = {"--tokenizer": "tokenizer.json", "--model": "*.safetensors"}[flag]
    others = "config.json" if load_format == "dummy" else others
    preferred = load_format != "gguf" and any(directory.glob(others))
    if not found or preferred or load_format == "safetensors":
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"{flag}: {directory} has several GGUF files; name one of {names}")
    return found[0]


def read_config(
    path: Path, overrides: Mapping[str, Any] | None = None, *, weights: bool = True
) -> tuple[dict[str, Any], str]:
    """The fields of config.json, or what a GGUF file says of them, and where they were found.

    ``overrides`` replace fields (``--hf-overrides``). ``ConfigError`` if a count is larger than the
    files can hold; without ``weights``, than any model's.
    """
    if path.is_file():
        (raw, shapes), where = SOURCES[path.suffix].config(path), str(path)
        held = Held.of(shapes, path.stat().st_size)
    else:
        file = path / "config.json"
        if not file.exists():
            raise ConfigError(f"--model: no config.json in {path}; is it a checkpoint?")
        held = held_in(path) if weights else Held()
        raw, where, beside = read_json(file), str(file), path / "hf_quant_config.json"
        if not raw.get("quantization_config") and beside.exists():  # as ModelOpt wrote it at first
            raw["quantization_config"] = {
                "quant_method": "modelopt",
                **(read_json(beside).get("quantization") or {}),
            }
    check_counts(raw, held, where)
    check_counts(overrides or {}, Held(), "--hf-overrides")
    return {**raw, **(overrides or {})}, where


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of a checkpoint's files; ``ConfigError`` if it is damaged."""
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model: cannot read {path} ({error}); fetch it again") from None
    return value


def _problem(error: Exception, name: str, revision: str | None, download_dir: str | None) -> str:
    """What is wrong and what to do, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is gated; accept its licence at https://huggingface.co/{name}, then set "
            "HF_TOKEN or run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}; give another --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no {name}, or it is private; check the name, or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError):
        where = download_dir or "the cache that HF_HOME names"
        return (
            f"{name} is no directory here, is not in {where}, and the hub cannot be asked; give a "
            "directory, or unset HF_HUB_OFFLINE if it is set"
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"cannot download {name} ({reason}); give a directory"
