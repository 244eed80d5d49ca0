"""Progress of a run: a bar on a terminal, a line a round elsewhere, nothing if not wanted."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich import progress
from rich.console import Console
from rich.text import Text

from polyfed.core.node import Name


class Progress:
    """Shows nothing.

    Attributes:
        title: what to call the run, if not by its method and seed.
    """

    title: str = ""

    def begin(self, title: str, rounds: int) -> None:
        """A run of so many rounds begins."""

    def skip(self, rounds: int) -> None:
        """So many rounds were done before (resume)."""

    def working(self, node: Name, phase: str) -> None:
        """A node begins a phase."""

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """A round is over; accuracies are empty when none was due."""

    def trouble(self, what: str) -> None:
        """Something went wrong, and the run goes on: the first time it is shown."""

    def end(self) -> None:
        """The run is over."""


class Bar(Progress):
    """A bar on standard error: round, who does what, mean accuracy, time left."""

    def __init__(self) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            progress.TextColumn("{task.fields[accuracy]}"),
            _Left(),
            progress.TextColumn("[dim]{task.fields[doing]}"),
            console=Console(stderr=True),
        )
        self._task: progress.TaskID | None = None

    def begin(self, title: str, rounds: int) -> None:
        """Add a bar."""
        self._bar.start()
        self._task = self._bar.add_task(
            self.title or title, total=rounds, accuracy="", doing="starting", ends=None
        )
        self._rounds, self._named, self._is_told = rounds, self.title or title, False
        self._from, self._since = 0, time.monotonic()

    def skip(self, rounds: int) -> None:
        """Move on to where the run stands."""
        self._from, self._since = rounds, time.monotonic()
        self._update(completed=rounds)

    def working(self, node: Name, phase: str) -> None:
        """Name the node and its phase."""
        self._update(doing=f"{node} {phase}")

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Move on by one round."""
        shown = {"accuracy": f"accuracy {_mean(accuracies):.3f}"} if accuracies else {}
        self._update(completed=tick, ends=self._ends(tick), **shown)

    def trouble(self, what: str) -> None:
        """Print a line above the bar."""
        if not self._is_told:
            self._bar.console.print(Text(_warned(self._named, what), style="red"))
        self._is_told = True

    def end(self) -> None:
        """Leave the bar as it is."""
        self._update(doing="")
        self._bar.stop()
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def _ends(self, tick: int) -> float | None:
        """When the run will end if its rounds go on as they did; pre-training does not count."""
        now = time.monotonic()
        if tick == 0:
            self._since = now
        done = tick - self._from
        return now + (now - self._since) / done * (self._rounds - tick) if done else None

    def _update(self, **fields: object) -> None:
        if self._task is not None:
            self._bar.update(self._task, **fields)  # type: ignore[arg-type]


class _Left(progress.ProgressColumn):
    """Time left, counted down between rounds; rich's own forgets rounds longer than 30 s."""

    def render(self, task: progress.Task) -> Text:
        ends = task.fields["ends"]
        if ends is None:
            return Text("")
        minutes, seconds = divmod(max(0, round(ends - time.monotonic())), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        return Text(f"{clock} left", style="cyan")


class Lines(Progress):
    """One line a round on standard error, for logs."""

    def begin(self, title: str, rounds: int) -> None:
        """Remember what runs."""
        self._title, self._rounds, self._is_told = self.title or title, rounds, False

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Print one line."""
        shown = f"  accuracy {_mean(accuracies):.4f}" if accuracies else ""
        sys.stderr.write(f"{self._title}  round {tick}/{self._rounds}{shown}\n")

    def trouble(self, what: str) -> None:
        """Print one line."""
        if not self._is_told:
            sys.stderr.write(f"{_warned(self._title, what)}\n")
        self._is_told = True


class _Share(Progress):
    """One of several runs that go on in step: its rounds count towards the whole."""

    def __init__(self, whole: _Whole) -> None:
        self._whole = whole
        whole.shares.append(self)
        self.rounds = self.done = 0
        self.has_begun = False
        self.mean: float | None = None

    def begin(self, title: str, rounds: int) -> None:
        """Say how many rounds this run has."""
        self.rounds, self.has_begun = rounds, True
        self._whole.begin()

    def skip(self, rounds: int) -> None:
        """Say how many of them were done before."""
        self.done = rounds

    def working(self, node: Name, phase: str) -> None:
        """Pass it on."""
        self._whole.shown.working(node, phase)

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        """Count the round."""
        self.done, self.mean = tick, _mean(accuracies) if accuracies else self.mean
        self._whole.update()

    def trouble(self, what: str) -> None:
        """Pass it on, with the name of the run."""
        self._whole.shown.trouble(f"{self.title}: {what}" if self.title else what)

    def end(self) -> None:
        """The whole ends with its last run."""
        self.done = self.rounds
        if all(share.done == share.rounds for share in self._whole.shares):
            self._whole.shown.end()


class _Whole:
    """Several runs shown as one: the round that all of them have reached."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.shares: list[_Share] = []
        self._at = -1

    def begin(self) -> None:
        """Begin when all runs have said how many rounds they have."""
        if all(share.has_begun for share in self.shares):
            self.shown.begin(f"{len(self.shares)} runs", max(s.rounds for s in self.shares))

    def update(self) -> None:
        """Show the round that all runs have reached."""
        behind = [share.done for share in self.shares if share.done < share.rounds]
        at = min(behind, default=max(share.rounds for share in self.shares))
        if at > self._at:
            self._at = at
            means = [share.mean for share in self.shares if share.mean is not None]
            self.shown.round_done(at, {Name(i): m for i, m in enumerate(means)})


def shares(wanted: bool | Progress | None, count: int) -> list[Progress]:
    """A progress for each of several runs that go on in step; shown as one."""
    if count == 1:
        return [suited(wanted)]
    whole = _Whole(suited(wanted))
    return [_Share(whole) for _ in range(count)]


def suited(wanted: bool | Progress | None) -> Progress:
    """The progress that suits where standard error goes; None shows it on terminals only."""
    if isinstance(wanted, Progress):
        return wanted
    if wanted is False:
        return Progress()
    if sys.stderr.isatty():
        return Bar()
    return Lines() if wanted else Progress()


def _warned(title: str, what: str) -> str:
    return f"{title}: {what}. It goes on; what follows is among its faults."


def _mean(accuracies: Mapping[Name, float]) -> float:
    return sum(accuracies.values()) / len(accuracies)
