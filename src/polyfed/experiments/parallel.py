"""Work in several processes: pieces are handed out one by one, and shown as one whole.

Ctrl-C, a piece that fails, or the end of the process that hands them out ends all processes. What
a piece computes does not depend on how many there are, but for torch's threads, which they share:
another number changes the order of sums.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from polyfed.core.node import Name
from polyfed.engines.progress import Progress
from polyfed.errors import PolyfedError, RunError, first_line

Work = Callable[[Any, Progress], None]


@dataclass(frozen=True)
class Piece:
    """What one process does at a time.

    Attributes:
        title: what to call it where it fails.
        rounds: how many it will tell of.
        what: that which the work is given; it must be picklable, as the work must.
    """

    title: str
    rounds: int
    what: Any


def in_processes(pieces: Sequence[Piece], work: Work, count: int, shown: Progress) -> None:
    """Do the work of all pieces in so many processes.

    Args:
        pieces: what is to be done, in the order in which it is begun.
        work: does one piece, and tells of its rounds.
        count: how many processes.
        shown: where the rounds of all pieces are shown, as rounds of one.

    Raises:
        RunError: a piece failed, or its process was ended.
    """
    crew = _Crew(pieces, work, min(count, len(pieces)), shown)
    try:
        crew.run()
    finally:
        crew.end()


class _Crew:
    """The processes, and what each of them is doing."""

    def __init__(self, pieces: Sequence[Piece], work: Work, count: int, shown: Progress) -> None:
        self.pieces, self.shown = pieces, shown
        self.left = deque(range(len(pieces)))
        self.rounds = [0] * len(pieces)
        self.doing: dict[Connection, int] = {}
        self.processes: dict[Connection, SpawnProcess] = {}
        self.work, self.count = work, count

    def run(self) -> None:
        """Begin the processes, and hand out pieces until all are done."""
        self.shown.begin(f"{self.count} processes", sum(piece.rounds for piece in self.pieces))
        context, threads = get_context("spawn"), max(1, torch.get_num_threads() // self.count)
        for _ in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.work, threads), daemon=True)
            process.start()
            self.processes[ours] = process
            theirs.close()  # so that the end of the process is the end of the pipe
            self._hand_out(ours)
        while self.doing:
            for each in wait(list(self.doing)):
                if isinstance(each, Connection):
                    self._hear(each)

    def end(self) -> None:
        """End every process, whatever it is doing."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join()
        self.shown.end()

    def _hand_out(self, to: Connection) -> None:
        """The next piece, if there is one."""
        self.doing.pop(to, None)
        if self.left:
            self.doing[to] = self.left.popleft()
            with suppress(OSError):  # a process that is no more: the end of its pipe tells
                to.send(self.pieces[self.doing[to]].what)

    def _hear(self, one: Connection) -> None:
        number = self.doing[one]
        piece = self.pieces[number]
        try:
            kind, said, accuracy = one.recv()
        except (EOFError, OSError):
            self.processes[one].join()
            code = self.processes[one].exitcode
            raise RunError(
                f"{piece.title}: its process was ended (exit code {code}; -9 is often a lack of "
                "memory). The same command goes on from there; try fewer jobs."
            ) from None
        if kind == "failed":
            raise RunError(f"{piece.title}: {said}")
        if kind == "trouble":
            self.shown.trouble(f"{piece.title}: {said}")
            return
        self.rounds[number] = piece.rounds if kind == "done" else said
        self.shown.round_done(sum(self.rounds), {} if accuracy is None else {"": accuracy})
        if kind == "done":
            self._hand_out(one)


class _Told(Progress):
    """Tells the rounds of a piece to who handed it out."""

    def __init__(self, to: Connection) -> None:
        self._to = to

    def skip(self, rounds: int) -> None:
        """Rounds that were done before."""
        self._to.send(("round", rounds, None))

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """A round that is over."""
        mean = sum(accuracies.values()) / len(accuracies) if accuracies else None
        self._to.send(("round", tick, mean))

    def trouble(self, what: str) -> None:
        """What went wrong."""
        self._to.send(("trouble", what, None))


def _serve(to: Connection, work: Work, threads: int) -> None:
    """A process: piece after piece, until it is ended or nobody is there to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who began this process ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, BrokenPipeError):
        while True:
            what = to.recv()
            try:
                work(what, _Told(to))
            except (EOFError, BrokenPipeError):
                raise
            except torch.OutOfMemoryError as error:
                text = f"the GPU's memory is full ({first_line(error)})"
                to.send(("failed", f"{text} The same command goes on; try fewer jobs.", None))
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                ours = isinstance(error, PolyfedError)
                to.send(("failed", str(error) if ours else traceback.format_exc(), None))
                return
            to.send(("done", 0, None))


def _end_with_parent() -> None:
    """End this process when the one that began it has ended, even if it was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
