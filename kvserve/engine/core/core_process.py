"""Both ends of an engine core in a process of its own: msgspec messages over ZeroMQ.

Every message is two frames, its kind and its body. Only this module imports either library, so the
engine itself runs without them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio

from kvserve.config import EngineConfig
from kvserve.engine.core.core_loop import (
    Abort,
    Command,
    MakeOffers,
    OnDeath,
    OnOutputs,
    ResetPrefixCache,
    Stop,
    Unreadable,
    WatchPool,
    run_core,
    serving_core,
)
from kvserve.engine.device.child import parents_end, start_child
from kvserve.engine.device.pages import share_one_arena
from kvserve.engine.messages import Branches, EngineInfo, StepOutputs
from kvserve.folders import scratch_folder
from kvserve.log import ConfigError, EngineDeadError, configure_logging, logger

_KINDS: dict[bytes, type] = {
    kind.__name__.encode(): kind
    for kind in (
        *(Branches, Abort, ResetPrefixCache, WatchPool, MakeOffers, Stop),
        *(EngineInfo, StepOutputs),
    )
}
_REFUSED, _FAILED, _STAGE = b"refused", b"failed", b"stage"
_IDLE_POLL_MS = 500
_EXIT_TIMEOUT_S = 5.0
_LAST_WORDS_S = 0.5


class ProcessClient:
    """Starts the process and talks to it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.stage = "loading torch"
        self._process: subprocess.Popen[bytes]
        self._pipe: Connection
        self._started = False
        self._reader: asyncio.Task[None] | None = None

    async def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> EngineInfo:
        """Wait until the model is loaded; raises ``ConfigError`` if it cannot be."""
        addresses = self._open_sockets()
        self._process, self._pipe = start_child(__name__)
        # At exit, if nobody has stopped it: it obeys while it loads, and then misses its parent.
        weakref.finalize(self, self._process.terminate)
        self._started, self._died = True, asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._on_exit)
        try:
            with suppress(OSError):  # it has ended; ``_next`` says so
                self._pipe.send((self._config, *addresses, logger.getEffectiveLevel()))
            while isinstance(info := await self._next(), str):
                self.stage = info
        except BaseException:
            await self.stop()
            raise
        assert isinstance(info, EngineInfo)
        self._reader = asyncio.create_task(self._read(on_outputs, on_death))
        return info

    @property
    def suspended(self) -> bool:
        """Whether a signal has stopped the process (SIGSTOP, a debugger); known on Linux alone."""
        if not self._started:
            return False
        try:
            facts = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return facts.rpartition(")")[2].split()[0] in "Tt"

    def send(self, command: Command) -> None:
        """Never blocks."""
        self._commands.send_multipart(_pack(command))

    async def stop(self) -> None:
        """Ask the process to exit, and kill it if it is still there after a few seconds."""
        if not self._started:
            return
        if self._reader is not None:
            self._reader.cancel()
        if not self._died.is_set():
            if self._reader is not None:
                self.send(Stop())
            else:
                self._process.terminate()  # while it loads, it reads no commands
            try:
                await asyncio.to_thread(self._process.wait, _EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if not self._died.is_set():
            self._on_exit()
        self._close_sockets()

    def _open_sockets(self) -> list[str]:
        """The addresses of commands and of outputs."""
        self._directory = scratch_folder("out")
        addresses = [f"ipc://{Path(self._directory.name) / name}" for name in ("in", "out")]
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PUSH)
        # Connect, not bind: a bound PUSH socket without a peer blocks its sender.
        self._commands.connect(addresses[0])
        # Not around a socket of ``_socket``: closing the outer one does not close that, which, when
        # it is collected, closes whichever socket has its address by then.
        self._outputs = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._outputs.set_hwm(0)
        self._outputs.bind(addresses[1])
        return addresses

    def _close_sockets(self) -> None:
        self._commands.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    async def _read(self, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        try:
            while True:
                message = await self._next()
                assert isinstance(message, StepOutputs)
                on_outputs(message)
        except EngineDeadError as error:
            on_death(error)
        except Exception as error:  # else open requests would wait forever
            logger.exception("the engine's answers cannot be read")
            on_death(EngineDeadError(f"its answers cannot be read: {error}"))

    async def _next(self) -> EngineInfo | StepOutputs | str:
        frames = asyncio.ensure_future(self._outputs.recv_multipart())
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait((frames, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        # The last message of a process may arrive after the process has ended.
        await asyncio.wait((frames,), timeout=_LAST_WORDS_S)
        if not frames.done():
            frames.cancel()
            raise EngineDeadError(
                f"the engine process ended (exit code {self._process.returncode}); see its log"
            )
        kind, body = frames.result()
        if kind == _REFUSED:
            raise ConfigError(body.decode())
        if kind == _FAILED:
            raise EngineDeadError(f"the engine failed: {body.decode()}")
        if kind == _STAGE:
            return body.decode()
        message: EngineInfo | StepOutputs = msgspec.msgpack.decode(body, type=_KINDS[kind])
        return message

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._process.wait()
        self._died.set()


def main() -> None:
    """Main function of the process."""
    signal.signal(signal.SIGTERM, _leave)  # no request is open while it loads
    pipe = parents_end()  # open until the process is gone, which is how the parent knows
    config, commands, outputs, log_level = pipe.recv()
    configure_logging(log_level)
    share_one_arena()
    channel = _SocketChannel(commands, outputs)
    try:

        def tell(stage: str) -> None:
            channel.send_frames([_STAGE, stage.encode()])

        with closing(serving_core(config, tell)) as core:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            channel.send_frames(_pack(core.described()))
            run_core(core, channel.receive, channel.send)
    except Exception as error:
        # The process exits now anyway: a SIGTERM from the parent must not interrupt it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        channel.send_frames(_last_words(error))
    finally:
        channel.close()


def _last_words(error: Exception) -> list[bytes]:
    """The message to the parent: a refusal, or a failure, whose traceback is logged here."""
    if isinstance(error, ConfigError | OSError):  # the latter is the system's refusal
        return [_REFUSED, str(error).encode()]
    if isinstance(error, MemoryError):
        return [_REFUSED, f"there is not enough memory: {error}".encode()]
    logger.error("the engine failed", exc_info=error)
    return [_FAILED, f"{type(error).__name__}: {error}".encode()]


def _leave(*_: object) -> NoReturn:
    """Exit by an exception, so that a running compiler ends and its unfinished file is deleted."""
    sys.exit(0)


class _SocketChannel:
    """The engine process's end of both sockets."""

    def __init__(self, commands: str, outputs: str) -> None:
        self._context = zmq.Context()
        self._commands = _socket(self._context, zmq.PULL)
        self._outputs = _socket(self._context, zmq.PUSH)
        self._commands.bind(commands)
        self._outputs.connect(outputs)
        self._parent = os.getppid()

    def receive(self, block: bool) -> Iterable[Command]:
        timeout = _IDLE_POLL_MS if block else 0
        while self._commands.poll(timeout):
            kind, body = self._commands.recv_multipart()
            yield _read_command(kind, body)
            timeout = 0
        if os.getppid() != self._parent:
            yield Stop()  # the server is gone

    def send(self, outputs: StepOutputs) -> None:
        self.send_frames(_pack(outputs))

    def send_frames(self, frames: list[bytes]) -> None:
        self._outputs.send_multipart(frames)

    def close(self) -> None:
        self._commands.close(linger=0)
        self._outputs.close(linger=1000)
        self._context.term()


def _read_command(kind: bytes, body: bytes) -> Command:
    """Decode a command. An invalid new sequence becomes ``Unreadable``, and the others go on."""
    try:
        command: Command = msgspec.msgpack.decode(body, type=_KINDS[kind])
    except msgspec.ValidationError as error:
        if kind != Branches.__name__.encode():
            raise
        read = msgspec.msgpack.decode(body)
        return Unreadable([read["first"]["seq_id"], *read["seq_ids"]], str(error))
    return command


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket with an unbounded queue: the server limits the number of requests."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


def _pack(message: object) -> list[bytes]:
    return [type(message).__name__.encode(), msgspec.msgpack.encode(message)]
