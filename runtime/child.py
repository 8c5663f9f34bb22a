"""One child process: born in a group of its own, dies with its parent, its end is seen at once and leaves no zombie."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
MAX_LOG_NBYTES = 32 * 1024 * 1024
def _die_with(parent: int) -> Callable[[], None]:
    """Return what a fresh child does before exec; calls nothing that could take a lock held by another thread."""
    prctl, getppid, leave = ctypes.CDLL(None).prctl, os.getppid, os._exit
    kill_signal = int(signal.SIGKILL)

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, kill_signal, 0, 0, 0)
        if getppid() != parent:  # it died before the line above took effect
            leave(1)

    return before_exec


class Child:
    """A running child. `on_exit(code)` is called once from the event loop, after the child has been reaped.

    Args:
        argv: command line; the first is the program.
        env: the whole environment.
        log: file that its output is appended to; renamed to `<log>.1` when a start finds it over 32 MiB.
        on_exit: told the exit code, negative for a signal.
        inherit: descriptors that it gets under their numbers.

    Raises:
        OSError: if the program cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path | None, on_exit: Callable[[int], None],
        *, inherit: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        output = _open_log(log) if log is not None else subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                pass_fds=tuple(inherit),
                preexec_fn=_die_with(os.getpid()),
            )
        finally:
            if output != subprocess.DEVNULL:
                os.close(output)
        self.pid = self._process.pid
        self.code: int | None = None
        self._watch()

    def _watch(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # an old kernel or a sandbox without pidfd
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True).start()
            return

        def readable() -> None:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._ended()

        self._loop.add_reader(fd, readable)

    def _wait_in_thread(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended)

    def _ended(self) -> None:
        # Until it is reaped nobody else can get its number: the moment to end what it has left in its group.
        self.signal_group(signal.SIGKILL)
        self.code = self._process.wait()
        self._on_exit(self.code)

    @property
    def running(self) -> bool:
        """Whether its exit has not been seen yet."""
        return self.code is None

    def signal(self, number: int) -> None:
        """Send a signal to the child itself."""
        if self.running:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def signal_group(self, number: int) -> None:
        """Send a signal to the child and its descendants."""
        if self.running:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG_NBYTES:
        path.replace(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
