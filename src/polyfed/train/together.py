"""The work of many nodes: one by one, or what is alike as one computation.

An engine hands over jobs that do not depend on each other; `Trainer` decides how they are done. By
`auto`, on a GPU a short measurement decides; its outcome is kept for the machine, so that a run
repeated tomorrow is done the same way. On a CPU, whose runs are the same bits, no clock may decide:
there `auto` trains one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.nn.modules.conv import _ConvNd

from polyfed.core.data import Split
from polyfed.core.node import Node
from polyfed.errors import first_line
from polyfed.train.alike import exam_key, job_key, structure, why_alone
from polyfed.train.cohort import Kept, fit_cohort, score_cohort
from polyfed.train.columns import Columns
from polyfed.train.evaluate import judged
from polyfed.train.lanes import Lanes, can_take, lane_key
from polyfed.train.loop import Fitted, fit, moves_batchnorm, training_split
from polyfed.train.stepper import CannotStackError
from polyfed.train.tail import Tails
from polyfed.train.track import Job

Stack = Literal["auto", "always", "never"]
T = TypeVar("T")

_CPU_BYTES = 1 << 30  # of one stack; on a GPU a quarter of its memory
_LANES = 5  # networks side by side; see `lanes`
_FEWEST = 2  # networks with convolutions that are stacked; fewer get lanes
_LANES_KEPT = 4  # sets of them, for later phases
_MEASURED_ROWS = 64
_WORTH_MEASURING = 50  # steps of a node


class StackWarning(UserWarning):
    """Nodes that were to be trained as one are trained one by one."""


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
    """Does jobs and exams.

    Args:
        stack: train what is alike as one: where it is faster on a GPU (auto), wherever possible,
            or never.
        graph: use CUDA graphs where there is a GPU.
        share: of a GPU's memory, where others use it, too.
    """

    def __init__(self, stack: Stack = "auto", *, graph: bool = True, share: float = 1.0) -> None:
        self.stack, self.graph, self.share = stack, graph, share
        self._structures: dict[int, tuple[Any, int]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._batchnorm: dict[Hashable, bool] = {}
        self._convolutional: dict[int, bool] = {}
        self._columns = Columns()
        self._kept: Kept = {}
        self._pays: dict[Hashable, bool] = {}
        self._stacked: set[Hashable] = set()  # networks that were trained in a stack
        self._lanes: dict[Hashable, Lanes] = {}
        self._tails = Tails()

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        """Train every job; where only the last parts move, on what the others put out."""
        taken = self._on_tails(jobs)
        jobs = [job for job, _ in taken]
        done = _by_groups(jobs, self._job_groups(jobs), self._train_group)
        return [
            replace(each, seconds=each.seconds + seconds)
            for each, (_, seconds) in zip(done, taken, strict=True)
        ]

    def examine(self, exams: Sequence[Exam]) -> list[Done]:
        """Judge every node."""
        return _by_groups(exams, self._exam_groups(exams), self._examine_group)

    # ---- jobs

    def _on_tails(self, jobs: Sequence[Job]) -> list[tuple[Job, float]]:
        """The jobs, on tails where that pays, and the seconds it took to put them there."""
        if self.stack == "never" or not jobs:
            return [(job, 0.0) for job in jobs]
        device = _split(jobs[0]).x.device
        wherever = self.stack == "always" or device.type == "cuda"
        least = 1 if wherever else _WORTH_MEASURING
        return self._tails.take(jobs, least=least, most=self._budget(device))

    def _job_groups(self, jobs: Sequence[Job]) -> Iterator[list[int]]:
        if self.stack == "never" or len(jobs) == 1:
            yield from ([i] for i in range(len(jobs)))
            return
        groups: dict[tuple[Hashable, ...], list[int]] = {}
        lanes = [self._lane(job) for job in jobs]
        few = [lane and self._has_few_columns(job) for job, lane in zip(jobs, lanes, strict=True)]
        alike = Counter(self._key(job) for job, has in zip(jobs, few, strict=True) if has)
        for i, job in enumerate(jobs):
            lane = () if few[i] and alike[self._key(job)] >= _FEWEST else lanes[i]
            why = "" if lane or few[i] else why_alone(job) or self._keeps_statistics(job)
            if why:
                self._say(job, why)
            key = ("alone", i) if why else lane or self._key(job)
            groups.setdefault(key, []).append(i)
        for key, members in groups.items():
            if key[0] == "lane":
                yield members
                continue
            members.sort(key=lambda i: (repr(jobs[i].phase.optimiser), -_num_steps(jobs[i])))
            if len(members) > 1 and self._is_better([jobs[i] for i in members], key):
                yield from _pieces(members, self._most_rows([jobs[i] for i in members]))
            else:
                yield from ([i] for i in members)

    def _train_group(self, jobs: Sequence[Job]) -> list[Fitted]:
        lane = self._lane(jobs[0], is_alone=len(jobs) == 1)
        if lane and not self._is_stack(jobs):
            return self._train_lanes(jobs, lane)
        jobs[0].shown()
        if len(jobs) > 1 or self._is_graphed(jobs[0]):
            try:
                kind = lane_key(jobs[0], self._structure(jobs[0].node))
                fitted = fit_cohort(
                    jobs, graph=self.graph, kept=self._kept, kind=kind, share=self.share
                )
                if not lane:  # else large batches, one network after the other, are faster
                    self._stacked.add(self._structure(jobs[0].node))
                return fitted
            except CannotStackError as error:
                self._say(jobs[0], f"it cannot be stacked ({first_line(error)})")
                alone = self._key_of_one(jobs[0])
                self._pays[self._key(jobs[0]) if len(jobs) > 1 else alone] = False
                if lane:
                    return [self._train_group([job])[0] for job in jobs]
        done = []
        for job in jobs:
            job.shown()
            done.append(fit(job.node, job.phase, *job.path))
        return done

    def _lane(self, job: Job, *, is_alone: bool = False) -> tuple[Hashable, ...]:
        """On a GPU: which lanes a network with BatchNorm or convolutions takes, if any.

        So does a tail that is alone: a stack of one would capture a graph for every phase's data.
        """
        if self.stack == "never" or not self.graph or not _on_gpu(job):
            return ()
        is_tail = is_alone and self._tails.made(job.node.model)
        if not (is_tail or self._keeps_statistics(job) or self._convolves(job)):
            return ()
        if not can_take(job):
            return ()
        key = "lane", lane_key(job, self._structure(job.node))
        return key if self._pays.get(key, True) else ()

    def _has_few_columns(self, job: Job) -> bool:
        """Whether a network that would get a lane is better off in a stack; see `columns`."""
        if not self._lane(job) or why_alone(job) or not self._pays.get(self._key(job), True):
            return False
        if job.phase.stop is not None and self._keeps_statistics(job):
            return False
        return self._columns.are_few(job, self._structure(job.node))

    def _is_stack(self, jobs: Sequence[Job]) -> bool:
        """Whether networks that would get lanes are one stack."""
        keys = {self._key(job) for job in jobs} if self._has_few_columns(jobs[0]) else set()
        return len(jobs) >= _FEWEST and len(keys) == 1

    def _train_lanes(self, jobs: Sequence[Job], lane: tuple[Hashable, ...]) -> list[Fitted]:
        count = min(_LANES, len(jobs), self._most_rows(jobs))
        lanes = self._lanes.pop((lane, count), None) or Lanes(jobs, count, graph=self.graph)
        fitted = lanes.fit(jobs)
        if lanes.refusal:  # from now on, the loop
            self._pays[lane] = False
            self._say(jobs[0], f"its step cannot be a CUDA graph ({lanes.refusal})")
            return fitted
        self._lanes[lane, count] = lanes
        for old in list(self._lanes)[:-_LANES_KEPT]:
            del self._lanes[old]
        return fitted

    def _is_better(self, jobs: Sequence[Job], key: tuple[Hashable, ...]) -> bool:
        """Whether the stack is the faster way; by `auto`, nothing is stacked on a CPU."""
        if self.stack == "always" or self._has_few_columns(jobs[0]):
            return self._pays.get(key, True)
        if not _on_gpu(jobs[0]):
            return False
        if key not in self._pays:
            if _num_steps(jobs[0]) < _WORTH_MEASURING:
                return True
            device = training_split(jobs[0].node, jobs[0].phase).x.device
            net = structure(jobs[0].node.model.net)
            text = _text((net, *key[1:]), len(jobs), device)
            self._pays[key] = remembered(text, lambda: measure(jobs))
        return self._pays[key]

    def _is_graphed(self, job: Job) -> bool:
        """Whether one node is trained as a stack of one, because its steps become a CUDA graph."""
        if self.stack == "never" or not self.graph or not _on_gpu(job):
            return False
        if _num_steps(job) < _WORTH_MEASURING or why_alone(job) or self._keeps_statistics(job):
            return False
        key = self._key_of_one(job)
        if self.stack == "always":
            return self._pays.get(key, True)
        if key not in self._pays:
            device = training_split(job.node, job.phase).x.device
            text = _text((structure(job.node.model.net), *key[1:]), 1, device)
            self._pays[key] = remembered(text, lambda: measure([job]))
        return self._pays[key]

    def _key(self, job: Job) -> tuple[Hashable, ...]:
        return job_key(job, self._structure(job.node))

    def _key_of_one(self, job: Job) -> tuple[Hashable, ...]:
        """What the speed of one node's steps depends on."""
        phase = job.phase
        size = phase.batch_size(len(job.node.data[phase.split]))
        kind = type(phase.objective).__qualname__
        return self._structure(job.node), phase.parts, kind, job.node.model.precision, size

    # ---- exams

    def _exam_groups(self, exams: Sequence[Exam]) -> Iterator[list[int]]:
        groups: dict[Hashable, list[int]] = {}
        for i, exam in enumerate(exams):
            net = self._structure(exam.node) if self._stacked else None
            joins = net in self._stacked and exam.node.score is None
            key = exam_key(exam.node, exam.split, net) if joins else ("alone", i)
            groups.setdefault(key, []).append(i)
        for members in groups.values():
            yield from _pieces(members, self._most_rows([exams[i] for i in members]))

    def _examine_group(self, exams: Sequence[Exam]) -> list[float]:
        if len(exams) > 1:
            return score_cohort([exam.node for exam in exams], exams[0].split)
        return [judged(exams[0].node, exams[0].split)]

    def _most_rows(self, work: Sequence[Job] | Sequence[Exam]) -> int:
        """Rows that fit in memory: parameters, gradients, two moments, the data, and columns."""
        inputs = {id(x): x for x in (_split(each).x for each in work)}  # of which rows share some
        x = _split(work[0]).x
        own = 4 * sum(t.numel() * t.element_size() for t in work[0].node.model.net.parameters())
        own += sum(t.numel() * t.element_size() for t in inputs.values()) // len(work)
        if isinstance(work[0], Job) and self._has_few_columns(work[0]):
            own += 2 * self._columns.bytes_of(work[0], self._structure(work[0].node))
        return max(2, int(self._budget(x.device) // max(1, own)))

    def _budget(self, device: torch.device) -> float:
        """Bytes of one stack, or of what the fronts of networks put out."""
        if device.type != "cuda":
            return _CPU_BYTES
        free, total = torch.cuda.mem_get_info(device)  # others may hold the rest
        return min(total * self.share, free + torch.cuda.memory_reserved(device)) / 4

    def _structure(self, node: Node) -> int:
        """A number that equal networks share."""
        net = node.model.net
        if id(net) not in self._structures:
            number = self._numbers.setdefault(structure(net), len(self._numbers))
            self._structures[id(net)] = net, number
        return self._structures[id(net)][1]

    def _keeps_statistics(self, job: Job) -> str:
        key = self._structure(job.node), job.phase.parts, tuple(job.node.model.parts)
        if key not in self._batchnorm:
            self._batchnorm[key] = moves_batchnorm(job.node.model, job.phase.parts)
        return "BatchNorm keeps statistics while it trains" if self._batchnorm[key] else ""

    def _convolves(self, job: Job) -> bool:
        """Whether a network has convolutions: stacked, they are one in groups, which is slow."""
        number = self._structure(job.node)
        if number not in self._convolutional:
            modules = job.node.model.net.modules()
            self._convolutional[number] = any(isinstance(m, _ConvNd) for m in modules)
        return self._convolutional[number]

    def _say(self, job: Job, why: str) -> None:
        if self.stack == "always":
            kind = type(job.node.model.net).__name__
            text = f"phase '{job.phase.label}' of {kind} networks is trained one by one: {why}."
            warnings.warn(text, StackWarning, stacklevel=2)


def measure(jobs: Sequence[Job]) -> bool:
    """Whether some of these jobs, on copies, take less time stacked than one by one."""
    jobs = jobs[:_MEASURED_ROWS]

    def short(job: Job) -> Job:
        phase = replace(job.phase, epochs=None, steps=40, stop=None, walk=False)
        node = replace(job.node, model=job.node.model.copy(), memory=dict(job.node.memory))
        return Job(node, phase, job.path)

    copies = [short(job) for job in jobs]
    ways: dict[str, Callable[[], object]] = {
        "stack": lambda: fit_cohort(copies),
        "loop": lambda: fit(copies[0].node, copies[0].phase, *copies[0].path),
    }
    seconds: dict[str, float] = {}
    try:
        for _ in range(2):  # the first warms up
            for way, go in ways.items():
                started = time.perf_counter()
                go()
                if _on_gpu(jobs[0]):
                    torch.cuda.synchronize()
                seconds[way] = time.perf_counter() - started
    except CannotStackError:  # the trainer will find out why, and say so
        return True
    return seconds["stack"] < seconds["loop"] * len(jobs)


def remembered(question: str, ask: Callable[[], bool]) -> bool:
    """The answer this machine gave before, else a new one."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache) / "polyfed" / "stack.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    name = hashlib.blake2b(question.encode(), digest_size=12).hexdigest()
    if not isinstance(known.get(name), bool):
        known[name] = ask()
        with contextlib.suppress(OSError):  # a home that cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
    return bool(known[name])


def _by_groups(
    items: Sequence[T], groups: Iterator[list[int]], do: Callable[[Sequence[T]], Sequence[Any]]
) -> list[Done]:
    """Do the items group by group; every item of a group takes the same share of its time."""
    done: dict[int, Done] = {}
    for members in groups:
        started = time.perf_counter()
        results = do([items[i] for i in members])
        share = (time.perf_counter() - started) / len(members)
        done |= {i: Done(r, share) for i, r in zip(members, results, strict=True)}
    return [done[i] for i in range(len(items))]


def _pieces(members: list[int], most: int) -> Iterator[list[int]]:
    count = -(-len(members) // most)
    size = -(-len(members) // count)
    yield from (members[i : i + size] for i in range(0, len(members), size))


def _split(work: Job | Exam) -> Split:
    return work.node.data[work.phase.split if isinstance(work, Job) else work.split]


def _on_gpu(job: Job) -> bool:
    return training_split(job.node, job.phase).x.device.type == "cuda"


def _num_steps(job: Job) -> int:
    phase, length = job.phase, len(job.node.data[job.phase.split])
    return phase.steps or (phase.epochs or 0) * -(-length // phase.batch_size(length))


def _text(key: Hashable, rows: int, device: torch.device) -> str:
    """What a measurement depends on, as text that is the same tomorrow."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    scale = min(rows, _MEASURED_ROWS).bit_length()
    return repr((repr(key), scale, name, torch.__version__, torch.get_num_threads()))
