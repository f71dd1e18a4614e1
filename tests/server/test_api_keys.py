"""Keys of ``--api-key-file``: they come and go while the server runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvserve.log import ConfigError
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.api_keys import ApiKeys
from tests.server.conftest import StartServer


def replace(file: Path, text: str) -> None:
    """As Kubernetes does: another file under the same name."""
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


def test_keys_rotate_without_a_restart(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = start_server(api_key=("fixed",), api_key_file=str(file))

    def works(key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code in (200, 401)
        return answer.is_success

    assert [works(key) for key in ("fixed", "old", "new")] == [True, True, False]
    replace(file, "old\nnew, with a space")
    assert [works(key) for key in ("fixed", "old", "new", "with a space")] == [True] * 4
    replace(file, "new\n")
    assert [works(key) for key in ("fixed", "old", "new")] == [True, False, True]
    # A client keeps its number: a new key is not mistaken for who had another.
    clients = [params.client for _, params, _ in server.engine.seen]
    assert clients == [f"key {n}" for n in (0, 1, 0, 1, 2, 3, 0, 2)]
    # What cannot be read changes nothing, and is logged once.
    caplog.clear()
    file.unlink()
    assert works("new") and works("fixed") and not works("old")
    assert len(caplog.records) == 1 and "stay as they were" in caplog.text
    replace(file, " \n,\n")
    assert works("new") and "has no key" in caplog.text
    replace(file, "newest")
    assert works("newest") and not works("new")


def test_a_file_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a")
    keys = ApiKeys((), str(file))
    assert keys.client(b"a") == 0
    with file.open("a") as opened:
        opened.write("\nb")
    assert (keys.client(b"a"), keys.client(b"b"), keys.client(b"")) == (0, 1, None)


@pytest.mark.parametrize(("text", "said"), [(None, "cannot read"), ("\n", "has no key")])
def test_a_server_does_not_start_without_its_keys(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-key-file: .*{said}"):
        ApiKeys(("given",), str(file))


def test_a_file_alone_asks_for_keys() -> None:
    assert ServeSettings(api_key_file="keys").has_keys and not ServeSettings().has_keys
