"""The work of many nodes: training one by one, or equal phases of equal networks as one stack.

An engine hands over jobs that do not depend on each other; `Trainer` decides how they are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from polyfed.core.node import Node
from polyfed.core.phase import Phase
from polyfed.train.evaluate import accuracy
from polyfed.train.loop import fit

Stack = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Job:
    """One node through one phase; `path` names its random streams."""

    node: Node
    phase: Phase
    path: tuple[str | int, ...]
    shown: Callable[[], None] = field(default=lambda: None, compare=False)


@dataclass(frozen=True)
class Exam:
    """How well a node does on a split."""

    node: Node
    split: str = "test"


@dataclass(frozen=True)
class Done:
    """What a job or an exam came to, and its share of the time."""

    result: Any  # Fitted of a job, a number of an exam
    seconds: float


class Trainer:
    """Does jobs and exams, in the order given unless they are done as one."""

    def __init__(self, stack: Stack = "never") -> None:
        self.stack = stack

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        """Train every job."""
        return [self._one(job) for job in jobs]

    def examine(self, exams: Sequence[Exam]) -> list[Done]:
        """Judge every node."""
        return [_judge(exam) for exam in exams]

    def _one(self, job: Job) -> Done:
        started = time.perf_counter()
        job.shown()
        fitted = fit(job.node, job.phase, *job.path)
        return Done(fitted, time.perf_counter() - started)


def _judge(exam: Exam) -> Done:
    started = time.perf_counter()
    node, split = exam.node, exam.node.data[exam.split]
    score = accuracy(node.model, split) if node.score is None else node.score(node.model, split)
    return Done(score, time.perf_counter() - started)
