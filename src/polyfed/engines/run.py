"""`run` and `resume`: one method on one federation, from the start or from where it stopped."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from pathlib import Path
from typing import Any

from polyfed import methods, options, tasks, topologies
from polyfed.core.method import Method
from polyfed.core.model import Precision
from polyfed.core.node import Name, Node
from polyfed.core.topology import Topology
from polyfed.engines import privacy
from polyfed.engines.gate import check_absent, check_is_method, federation, plain_seed
from polyfed.engines.local import LocalEngine, Settings, Steps, drive
from polyfed.engines.progress import Progress, suited
from polyfed.engines.table import Text, faults_line, run_table
from polyfed.errors import ConfigError, RunError
from polyfed.record import Ledger, Log, Recorder
from polyfed.record.checkpoint import Checkpoint
from polyfed.record.log import read
from polyfed.record.recorder import go_on, read_config, read_result
from polyfed.tasks import Task
from polyfed.train.together import Stack, Trainer


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        method: name of the method.
        accuracy: final test accuracy of every node.
        metrics: everything recorded, a dictionary a line.
        ledger: every message that crossed.
        faults: every message refused, every absence, every divergence.
        folder: where it is written, if anywhere.
        nodes: the trained nodes, where the run happened in this process.
        places: the hubs, likewise.
        config: enough to run it again.
    """

    method: str
    accuracy: Mapping[Name, float]
    metrics: Sequence[Mapping[str, Any]]
    ledger: Ledger
    faults: Sequence[Mapping[str, Any]]
    folder: Path | None = None
    nodes: Mapping[Name, Node] = field(default_factory=dict)
    places: Mapping[Name, Node] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        measured = (m["node"] for m in self.metrics if "node" in m)
        self.ledger.names = frozenset([*self.accuracy, *self.nodes, *self.places, *measured])

    @property
    def mean_accuracy(self) -> float:
        """Mean over nodes of the final test accuracy; NaN where nobody has test data."""
        return statistics.fmean(self.accuracy.values()) if self.accuracy else math.nan

    @property
    def seconds(self) -> float:
        """Wall-clock time of pre-training and all rounds."""
        return float(sum(m["seconds"] for m in self.metrics if "seconds" in m))

    @property
    def epsilon(self) -> Mapping[Name, float]:
        """Privacy loss of every node whose messages had noise, at the guard's delta."""
        return privacy.spent(self.metrics, privacy.guard_of(self.config))

    def table(self) -> Text:
        """The result as a table to read, and what faults there were."""
        return Text("\n\n".join(filter(None, [run_table(self), faults_line(self)])))

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Read a run folder; a run that is not finished shows what it has so far."""
        folder = Path(folder)
        config = read_config(folder)
        if "method" not in config:
            raise RunError(f"{folder} holds a comparison, not a single run.")
        metrics = read(folder / "metrics.jsonl")
        result = read_result(folder)
        last = {m["node"]: m["test_accuracy"] for m in metrics if "test_accuracy" in m}
        log = Log()
        log.records = read(folder / "ledger.jsonl")
        faults = read(folder / "faults.jsonl")
        accuracy = result["accuracy"] if result else last
        ledger = Ledger(log)
        return cls(config["method"], accuracy, metrics, ledger, faults, folder, config=config)


def run(
    method: Method,
    task: Task | Sequence[Node],
    *,
    nodes: Sequence[Node] | None = None,
    seed: int = 0,
    topology: str | Topology | None = None,
    device: str = "cpu",
    evaluate_every: int = 1,
    absent: Mapping[int, Sequence[Name]] | None = None,
    stack: Stack = "auto",
    precision: Precision = "float32",
    fail: str | None = None,
    checkpoint_every: int = 1,
    checkpoint_seconds: float = 0.0,
    folder: str | Path | None = None,
    progress: bool | Progress | None = None,
) -> Run:
    """Train a federation with a method.

    Args:
        method: the method with its hyper-parameters, such as `FedLinked(rounds=7)`.
        task: a ready-made task such as `tasks.digits()`, or your own nodes.
        nodes: the task's nodes for this seed, if they have been made already.
        seed: same seed, same numbers.
        topology: a topology, or its name and options ("gossip:cycles=3"); None takes the
            method's first.
        device: cpu, cuda, cuda:0, ...
        evaluate_every: rounds between evaluations.
        absent: nodes that are away in a round: `{3: ["M1"]}`.
        stack: train equal networks as one computation: "auto" (on a GPU, where a measurement
            says it is faster), "always" or "never".
        precision: what networks compute in: "float32" or, on a GPU, "bfloat16" (parameters and
            everything outside the networks stay float32).
        fail: what breaks and when: "cut 0-1 @3; kill M2 @5; heal @8".
        checkpoint_every: rounds between checkpoints in the folder; 0 writes none.
        checkpoint_seconds: time between checkpoints, at least.
        folder: where to write the run; None keeps it in memory.
        progress: True, False, None for terminals only, or how to show it.
    """
    settings = _settings(
        seed,
        device=device,
        evaluate_every=evaluate_every,
        absent=absent,
        stack=stack,
        precision=precision,
        fail=fail,
        checkpoint_every=checkpoint_every,
        checkpoint_seconds=checkpoint_seconds,
    )
    engine = _begin(method, task, nodes, topology, settings, folder, suited(progress), {})
    return finish_together([(engine, None)])[0]


def begin(
    method: Method,
    task: Task | Sequence[Node],
    *,
    nodes: Sequence[Node],
    seed: int,
    folder: Path | None,
    progress: Progress,
    moved: dict[int, Any],
    topology: str | Topology | None = None,
    **settings: Any,
) -> tuple[LocalEngine, Checkpoint | None]:
    """A run that is ready to go, from its start or from where its folder stands.

    It takes what `run` takes, and `moved`: tensors that runs beside it have on the device.
    """
    if folder is not None and (folder / "config.yaml").exists():
        return _reopen(folder, read_config(folder), method, nodes, progress, moved)
    made = _settings(seed, **settings)
    return _begin(method, task, nodes, topology, made, folder, progress, moved), None


def _begin(
    method: Method,
    task: Task | Sequence[Node],
    nodes: Sequence[Node] | None,
    topology: str | Topology | None,
    settings: Settings,
    folder: str | Path | None,
    progress: Progress,
    moved: dict[int, Any],
) -> LocalEngine:
    chosen = _topology(method, topology)
    owned = nodes is None and isinstance(task, Task)
    nodes = federation(task if nodes is None else nodes, settings.seed)
    recorder = Recorder.in_memory()
    engine = LocalEngine(method, nodes, chosen, settings, recorder, progress, moved, owned=owned)
    engine.config = _config(method, task, chosen, settings)
    if folder is not None:
        engine.recorder = Recorder.create(Path(folder), engine.config)
    return engine


def resume(
    folder: str | Path,
    *,
    method: Method | None = None,
    nodes: Sequence[Node] | None = None,
    progress: bool | Progress | None = None,
) -> Run:
    """Continue a run that was interrupted; a finished one is only read.

    Args:
        folder: the run's folder.
        method: the method, if it is one of your own.
        nodes: the nodes, if they are your own rather than a ready-made task's.
        progress: True, False, None for terminals only, or how to show it.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "method" not in config:
        raise RunError(f"{folder} holds a comparison, not a single run.")
    if read_result(folder) is not None:
        return Run.open(folder)
    if "party" in config:
        raise RunError(
            f"{folder} is one party's part of a run across machines. Continue it with: "
            f"{go_on(folder)}."
        )
    return finish_together([_reopen(folder, config, method, nodes, suited(progress), {})])[0]


def _reopen(
    folder: Path,
    config: Mapping[str, Any],
    method: Method | None,
    nodes: Sequence[Node] | None,
    progress: Progress,
    moved: dict[int, Any],
) -> tuple[LocalEngine, Checkpoint | None]:
    if method is None:
        method = methods.make(config["method"], config["options"])
    _check_same(folder, config, method)
    settings = options.build(Settings, config["settings"], "settings")
    if nodes is None and config["task"] is None:
        raise RunError(
            f"{folder} was run on your own nodes: continue it in Python with "
            "polyfed.resume(folder, nodes=...)."
        )
    task = tasks.make(config["task"], config["task_options"]) if nodes is None else nodes
    nodes = federation(task, settings.seed)
    topology = topologies.make(config["topology"])
    engine = LocalEngine(method, nodes, topology, settings, Recorder.in_memory(), progress, moved)
    engine.recorder, point = Recorder.reopen(folder)
    engine.config = config
    return engine, point


def _check_same(folder: Path, config: Mapping[str, Any], method: Method) -> None:
    """A run goes on with the method it was begun with."""
    check_is_method(method)
    now, then = plain(method), config["options"]
    begun, got = [config["method"]], [method.name]
    for name in then.keys() & now.keys() if begun == got else ():
        if now[name] != then[name]:
            begun.append(f"{name}={then[name]}")
            got.append(f"{name}={now[name]}")
    if begun != got:
        raise RunError(
            f"{folder} was begun with {' '.join(begun)}, got {' '.join(got)}. Resume it with what "
            "it was begun with, or choose another folder."
        )


def check_run(
    method: Method,
    nodes: Sequence[Node],
    *,
    topology: str | Topology | None = None,
    **settings: Any,
) -> None:
    """Raise what `run` with these settings would raise before it trains."""
    chosen, made = _topology(method, topology), _settings(0, **settings)
    LocalEngine(method, nodes, chosen, made, Recorder.in_memory(), Progress())


def finish_together(
    begun: Sequence[tuple[LocalEngine, Checkpoint | None]], share: float = 1.0
) -> list[Run]:
    """Run several engines to their ends, in step; `share` is their part of a GPU's memory."""
    try:
        trainer = Trainer(begun[0][0].settings.stack, share=share)
        runs = drive([_steps(engine, point) for engine, point in begun], trainer)
    finally:
        for engine, _ in begun:
            engine.progress.end()
            engine.recorder.close()
    return runs


def _steps(engine: LocalEngine, point: Checkpoint | None) -> Steps[Run]:
    """A run that is written down as soon as it is over."""
    accuracy = yield from engine.steps(point)
    recorder = engine.recorder
    done = Run(
        engine.method.name,
        accuracy,
        recorder.metrics.records,
        recorder.ledger,
        recorder.faults.records,
        recorder.folder,
        engine.nodes,
        engine.places,
        engine.config,
    )
    loss = privacy.summary(recorder.metrics.records, engine.config.get("options", {}).get("guard"))
    recorder.finish({"accuracy": accuracy, **loss})
    return done


def _settings(
    seed: int, *, absent: Mapping[int, Sequence[Name]] | None = None, **others: Any
) -> Settings:
    return Settings(seed=plain_seed(seed), absent=check_absent(absent or {}), **others)


def _topology(method: Method, wanted: str | Topology | None) -> Topology:
    check_is_method(method)
    if wanted is None:
        return topologies.make(method.topologies[0])
    topology = topologies.make(wanted) if isinstance(wanted, str) else wanted
    if not isinstance(topology, Topology):
        raise ConfigError(f"a topology is a name such as 'star', or a Topology, got {wanted!r}.")
    if topology.name not in method.topologies:
        raise ConfigError(
            f"{method.name} runs on {', '.join(method.topologies)}, not on {topology.name}."
        )
    return topology


def _config(
    method: Method, task: Task | Sequence[Node], topology: Topology, settings: Settings
) -> dict[str, Any]:
    named = isinstance(task, Task)
    return {
        "method": method.name,
        "options": plain(method),
        "task": task.name if isinstance(task, Task) else None,
        "task_options": plain(task) if named else {},
        "topology": topologies.label(topology),
        "settings": plain(settings),
    }


def plain(config: Any) -> dict[str, Any]:
    """The fields of a configuration as YAML and JSON can hold them."""
    return {x.name: simple(getattr(config, x.name)) for x in dataclasses.fields(config)}


def simple(value: Any) -> Any:
    """A value as YAML and JSON can hold it."""
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, (tuple, list)):
        return [simple(v) for v in value]
    if isinstance(value, Mapping):
        return {k: simple(v) for k, v in value.items()}
    if isinstance(value, Number) and hasattr(value, "item"):  # numpy's
        return value.item()
    return value
