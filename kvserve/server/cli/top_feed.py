"""What ``kvserve top`` watches: the newest event of a server, read again whenever it comes back."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator

import httpx

from kvserve.log import ConfigError, RequestError
from kvserve.server.cli import terminal
from kvserve.server.cli.terminal import Json

AGAIN_S = 1.0


class Feed:
    """The newest ``event`` and what is ``wrong``, kept up to date by a thread."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self.event: Json | None = None
        self.served = ""
        self.wrong = "connecting"
        self.since = time.time()
        """When what is wrong began, or when the last event came; seconds since the epoch."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Pings come every 15 s while nothing changes.
        self._http = httpx.Client(base_url=self.base, headers=headers, timeout=httpx.Timeout(10.0))
        self._over = threading.Event()

    def check_key(self) -> None:
        """``RequestError`` if there is a server and it does not take the key."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self._http.get("/server_info")
            if answer.status_code in (401, 403):
                terminal.checked(answer)

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._http.close()

    def events(self) -> Generator[Json, None, None]:
        """The events of ``/v1/kv/events`` until the server ends; errors have its message."""
        try:
            timeout = httpx.Timeout(10.0, read=60.0)
            with self._http.stream("GET", "/v1/kv/events", timeout=timeout) as found:
                if found.is_error:
                    found.read()
                for line in terminal.checked(found).iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.ConnectError as exc:
            raise ConfigError(f"--url: no server at {self.base}: {exc}") from None
        except httpx.HTTPError as exc:
            raise RequestError(f"the connection broke: {exc}") from None

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                self._read_settings()
                for event in self.events():
                    self.event, self.wrong, self.since = event, "", time.time()
                self._note("the server has ended the stream")
            except (ConfigError, RequestError, httpx.HTTPError) as exc:
                self._note(str(exc).removeprefix("--url: "))
            except RuntimeError:  # closed while it read
                return
            self._over.wait(AGAIN_S)

    def _note(self, wrong: str) -> None:
        if not self.wrong:
            self.since = time.time()
        self.wrong = wrong

    def _read_settings(self) -> None:
        """Who is served: it may be another model than before."""
        try:
            info = terminal.checked(self._http.get("/server_info")).json()
        except httpx.ConnectError as exc:
            raise ConfigError(f"--url: no server at {self.base}: {exc}") from None
        args = "".join(f", {name} {value}" for name, value in info["policy"]["args"].items())
        model, policy = info["served_model_names"][0], info["policy"]["name"]
        self.served = f"{model}, policy {policy}{args}, kvserve {info['version']}"
