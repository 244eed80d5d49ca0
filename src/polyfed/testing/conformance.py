"""Conformance: whether a method is a good citizen, whoever wrote it.

    check_method(Ditto(lam=0.1))                                       # all checks, seconds
    @pytest.mark.parametrize("name", CHECKS)                           # or one test a check
    def test_conformance(name): CHECKS[name](Ditto(lam=0.1), tiny)

A check runs the method for two rounds on a tiny federation (or on yours) and raises
ConformanceError, naming the check and what went wrong. The rules, one check each:

    deterministic   same seed, same bits; torch's global generator is left alone
    seeds           another seed, other numbers
    resume          continued after any tick = uninterrupted, bit for bit
    declared        what crosses is what `sends` and `hears` announce
    private         no message holds a private input or a private list of labels
    node order      the order in which nodes are listed does not matter
    arrival order   the order in which messages arrive matters to rounding only
    frozen          parts that a phase does not move stay, bit for bit, buffers too
    one sample      a node with a single training sample does not stop the run
    one class       nor does a node with a single class
    absent          nor a node that is away for a round; nobody answers it
    nan             nor a message of NaN: it is refused and recorded, the round goes on
    stacked         equal networks trained as one computation end where they end one by one
    zero rounds     no rounds, no training, no messages
    options         hyper-parameters survive config.yaml
    nodes           the caller's nodes are as they were
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from polyfed import options, topologies
from polyfed.core.message import Message, Spec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.engines.local import LocalEngine, Settings
from polyfed.engines.progress import Progress
from polyfed.engines.run import plain
from polyfed.record import Recorder
from polyfed.testing.federations import one_class, one_sample, stackable, tiny
from polyfed.train.together import Stack, StackWarning

Nodes = Callable[[int], Sequence[Node]]
Check = Callable[[Method, Nodes], None]

CHECKS: dict[str, Check] = {}
_ROUNDS = 2
_ARRIVAL = 1e-4  # sums in another order differ by rounding


class ConformanceError(AssertionError):
    """A method breaks a rule: says which check, and how."""


class _BrokenError(Exception):
    """What a check found."""


def check_method(method: Method, nodes: Nodes | None = None) -> None:
    """Run every check.

    Args:
        method: the method, with hyper-parameters that train little; its `rounds` is not used.
        nodes: makes a federation for a seed, if the built-in one does not suit the method. It
            needs something random in training: batches smaller than the data, or dropout.
    """
    for check in CHECKS.values():
        check(method, tiny if nodes is None else nodes)


def _check(name: str) -> Callable[[Check], Check]:
    def register(body: Check) -> Check:
        @functools.wraps(body)
        def check(method: Method, nodes: Nodes) -> None:
            try:
                with torch.random.fork_rng(devices=[]):
                    body(replace(copy.deepcopy(method), rounds=_ROUNDS), nodes)
            except _BrokenError as why:
                raise ConformanceError(f"{method.name} fails '{name}': {why}") from None
            except Exception as error:  # whatever a method raises is the finding
                what = f"it raised {type(error).__name__}: {error}"
                raise ConformanceError(f"{method.name} fails '{name}': {what}") from error

        CHECKS[name] = check
        return check

    return register


# --- the checks ---------------------------------------------------------------------------------


@_check("deterministic")
def _deterministic(method: Method, nodes: Nodes) -> None:
    before = torch.random.get_rng_state()
    first = _outcome(method, nodes(0))
    if not torch.equal(before, torch.random.get_rng_state()):
        raise _BrokenError("the run moved torch's global generator; use node.stream(...).")
    torch.rand(7)  # a second run finds the global generator elsewhere, and used objects
    again = _outcome(method, nodes(0))
    _same(first, again, "two runs with the same seed differ")


@_check("seeds")
def _seeds(method: Method, nodes: Nodes) -> None:
    one, other = _outcome(method, nodes(0), seed=0), _outcome(method, nodes(0), seed=1)
    if not _difference(one.tensors, other.tensors):
        raise _BrokenError("seeds 0 and 1 end in the same models.")


@_check("resume")
def _resume(method: Method, nodes: Nodes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        keeper = _Keeper(Path(scratch))
        recorder = Recorder.create(keeper.folder, {})
        whole = _outcome(copy.deepcopy(method), nodes(0), progress=keeper, recorder=recorder)
        recorder.close()
        for tick in range(_ROUNDS + 1):
            engine = _engine(copy.deepcopy(method), nodes(0))
            engine.recorder, point = Recorder.reopen(keeper.copy_of(tick))
            engine.run(point)
            engine.recorder.close()
            _same(whole, _Outcome.of(engine), f"a run continued after tick {tick} differs")


@_check("declared")
def _declared(method: Method, nodes: Nodes) -> None:
    announced: dict[tuple[str, Name], list[Any]] = {}

    def noted(said: str) -> Callable[[Node], Spec]:
        def spec(node: Node) -> Spec:
            found: Spec = getattr(method, said)(node)
            announced.setdefault((said, node.name), []).append(_plain_spec(found))
            return found

        return spec

    engine = _engine(method, nodes(0), spied={said: noted(said) for said in ("sends", "hears")})
    engine.run()
    for fault in engine.recorder.faults.records:
        raise _BrokenError(f"an ordinary run has a fault: {fault}")
    for crossing in engine.recorder.ledger.crossings():
        is_up = crossing.source in engine.nodes
        said, node = ("sends", crossing.source) if is_up else ("hears", crossing.to)
        got = {t["name"]: (tuple(t["shape"]), t["dtype"]) for t in crossing.tensors}
        if got not in announced[said, node]:
            raise _BrokenError(
                f"from {crossing.source} to {crossing.to} crossed {got}, `{said}` announces "
                f"{announced[said, node][-1]}."
            )


@_check("private")
def _private(method: Method, nodes: Nodes) -> None:
    def send(node: Node) -> Message:
        message = method.send(node)
        for name, tensor in message.tensors.items():
            for split, data in node.data.items():
                if split != "public" and _leaks(tensor, data.x, data.y):
                    raise _BrokenError(
                        f"'{name}', sent by {node.name}, holds values of its private split "
                        f"'{split}'."
                    )
        return message

    _engine(method, nodes(0), spied={"send": send}).run()


@_check("node order")
def _node_order(method: Method, nodes: Nodes) -> None:
    listed, reversed_ = _outcome(method, nodes(0)), _outcome(method, list(nodes(0))[::-1])
    _same(listed, reversed_, "listing the nodes in reverse gives another result")


@_check("arrival order")
def _arrival_order(method: Method, nodes: Nodes) -> None:
    def combine(
        place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        backwards = dict(reversed(list(got.items())))
        other = method.combine(copy.deepcopy(place), backwards, list(to)[::-1])
        replies = method.combine(place, got, to)
        if replies.keys() != other.keys():
            raise _BrokenError("`combine` answers other nodes when messages arrive in reverse.")
        for name, reply in replies.items():
            for key, tensor in reply.tensors.items():
                if not _close(tensor, other[name].tensors[key]):
                    raise _BrokenError(
                        f"`combine` tells {name} another '{key}' when messages arrive in reverse."
                    )
        return replies

    _engine(method, nodes(0), spied={"combine": combine}).run()


@_check("frozen")
def _frozen(method: Method, nodes: Nodes) -> None:
    def watched(phases: Callable[..., Iterable[Phase]]) -> Callable[..., Iterator[Phase]]:
        def watch(node: Node, *message: Message) -> Iterator[Phase]:
            for phase in phases(node, *message):
                model = node.model
                rest = [p for p in model.parts if phase.parts and p not in phase.parts]
                before = model.state(*rest) if rest else {}
                yield phase
                changed = _difference(before, model.state(*rest) if rest else {})
                if changed:
                    raise _BrokenError(
                        f"phase '{phase.label}' moves {', '.join(phase.parts)}, but changed "
                        f"{changed} of node {node.name}."
                    )

        return watch

    stages = ("start", "local", "receive", "finish")
    _engine(method, nodes(0), spied={s: watched(getattr(method, s)) for s in stages}).run()


@_check("one sample")
def _one_sample(method: Method, nodes: Nodes) -> None:
    _check_finite(_outcome(method, one_sample(nodes(0))))


@_check("one class")
def _one_class(method: Method, nodes: Nodes) -> None:
    _check_finite(_outcome(method, one_class(nodes(0))))


@_check("absent")
def _absent(method: Method, nodes: Nodes) -> None:
    def combine(
        place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        replies = method.combine(place, got, to)
        if not set(replies) <= set(to):
            raise _BrokenError(f"`combine` answers {sorted(set(replies) - set(to))}, not asked.")
        return replies

    names = sorted(node.name for node in nodes(0))
    away = {1: (names[0],), 2: (names[-1],)}
    engine = _engine(method, nodes(0), absent=away, spied={"combine": combine})
    engine.run()
    outcome = _Outcome.of(engine)
    _check_finite(outcome)
    for tick, (name,) in away.items():
        said = {"tick": tick, "node": name, "fault": "absent"} in outcome.faults
        if name in engine.nodes and not said:
            raise _BrokenError(f"{name} was away at tick {tick}, but faults do not say so.")


@_check("nan")
def _nan(method: Method, nodes: Nodes) -> None:
    ordinary = _outcome(method, nodes(0))
    victim = min(node.name for node in method.prepare(nodes(0)))
    spoiled: list[Message] = []

    def send(node: Node) -> Message:
        message = method.send(node)
        if node.name != victim or spoiled:
            return message
        spoiled.append(_spoil(message))
        return spoiled[0]

    engine = _engine(method, nodes(0), spied={"send": send})
    engine.run()
    if not any(_is_spoilt(message) for message in spoiled):
        return  # it says nothing, or nothing that could be NaN
    outcome = _Outcome.of(engine)
    refused = [f["node"] for f in outcome.faults if f["fault"] == "message refused"]
    if refused != [victim]:
        raise _BrokenError(f"{victim} sent NaN once, but messages were refused from {refused}.")
    _check_finite(outcome)
    missing = _ways(ordinary, without=victim) - _ways(outcome, without=victim)
    if missing:
        raise _BrokenError(f"{victim} sent NaN, and these (tick, from, to) fell out: {missing}.")


@_check("stacked")
def _stacked(method: Method, nodes: Nodes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StackWarning)
        alone, stacked = (
            _outcome(method, list(map(stackable, nodes(0))), stack=way)
            for way in ("never", "always")
        )
    for name, tensor in alone.tensors.items():
        if not _close(tensor, stacked.tensors[name]):
            raise _BrokenError(
                f"{name} differs where equal networks were trained as one computation: is `losses` "
                "of an objective what the objective is the mean of?"
            )


@_check("zero rounds")
def _zero_rounds(method: Method, nodes: Nodes) -> None:
    method = replace(method, rounds=0)
    given = [node.model.state() for node in nodes(0)]
    engine = _engine(method, nodes(0))
    before = _Outcome.of(engine).tensors
    engine.run()
    changed = _difference(before, _Outcome.of(engine).tensors)
    if changed:
        raise _BrokenError(f"nothing was asked for, but {changed} changed.")
    if len(engine.recorder.ledger):
        raise _BrokenError("nothing was asked for, but messages crossed.")
    for node in engine.nodes.values():
        for view in method.views(node).values():
            for name, tensor in view.model.state().items():
                known = [state[name] for state in given if name in state]
                if known and not any(torch.equal(tensor, other) for other in known):
                    raise _BrokenError(f"`prepare` changed '{name}' of {view.name}.")


@_check("options")
def _options(method: Method, nodes: Nodes) -> None:
    written = yaml.safe_load(yaml.safe_dump(plain(method)))
    read = options.build(type(method), written, f"method {method.name}")
    if read != method:
        raise _BrokenError(f"written to config.yaml and read again, it is {read}, not {method}.")


@_check("nodes")
def _nodes(method: Method, nodes: Nodes) -> None:
    given = list(nodes(0))
    for node in given:
        for module in list(node.model.net.modules())[1::2]:
            module.training = False  # modes are the caller's too
    before = [_portrait(node) for node in given]
    _engine(method, given).run()
    for node, portrait in zip(given, before, strict=True):
        now = _portrait(node)
        for what in [*portrait, *now]:
            if not _equal(portrait.get(what), now.get(what)):
                raise _BrokenError(f"after the run, {what} of the caller's {node.name} differs.")


# --- running and comparing ----------------------------------------------------------------------


def _spy(method: Method, replaced: Mapping[str, Any]) -> Method:
    """The same method, with some of its functions replaced."""
    spied = {"__slots__": (), **{name: staticmethod(f) for name, f in replaced.items()}}
    spy = copy.copy(method)
    object.__setattr__(spy, "__class__", type("Spy", (type(method),), spied))
    return spy


class _Keeper(Progress):
    """Copies the run folder after every tick: what a run killed just then leaves behind."""

    def __init__(self, scratch: Path) -> None:
        self.folder, self._scratch = scratch / "run", scratch

    def copy_of(self, tick: int) -> Path:
        return self._scratch / f"after-{tick}"

    def round_done(self, tick: int, accuracies: Mapping[Name, float]) -> None:
        shutil.copytree(self.folder, self.copy_of(tick))


def _engine(
    method: Method,
    nodes: Sequence[Node],
    *,
    seed: int = 0,
    absent: Mapping[int, tuple[Name, ...]] | None = None,
    stack: Stack = "never",
    progress: Progress | None = None,
    recorder: Recorder | None = None,
    spied: Mapping[str, Any] | None = None,
) -> LocalEngine:
    """The engine for a run; `spied` replaces some of the method's functions."""
    engine = LocalEngine(
        method,
        nodes,
        topologies.make(method.topologies[0]),
        Settings(seed=seed, absent=absent, stack=stack),
        recorder or Recorder.in_memory(),
        progress or Progress(),
    )
    if spied:
        engine.method = _spy(method, spied)
    return engine


@dataclass(frozen=True)
class _Outcome:
    """What a run came to: models and memories, and its logs without the clock."""

    tensors: Mapping[str, Tensor]
    metrics: Sequence[Mapping[str, Any]]
    ledger: Sequence[Mapping[str, Any]]
    faults: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, engine: LocalEngine) -> _Outcome:
        tensors: dict[str, Tensor] = {}
        for node in [*engine.nodes.values(), *engine.places.values()]:
            state = node.model.state()
            tensors |= {f"'{name}' of {node.name}": t for name, t in state.items()}
            memory = node.memory
            tensors |= {f"memory '{n}' of {node.name}": t.clone() for n, t in memory.items()}
        recorder = engine.recorder
        crossings = [vars(crossing) for crossing in recorder.ledger.crossings()]
        metrics = [m for m in recorder.metrics.records if "seconds" not in m]
        return cls(tensors, _read(metrics), _read(crossings), _read(recorder.faults.records))


def _outcome(method: Method, nodes: Sequence[Node], **settings: Any) -> _Outcome:
    engine = _engine(method, nodes, **settings)
    engine.run()
    return _Outcome.of(engine)


def _read(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records as a folder gives them back: JSON, and its NaN is null."""

    def null(value: str) -> None:
        return None

    return [json.loads(json.dumps(record), parse_constant=null) for record in records]


def _same(one: _Outcome, other: _Outcome, what: str) -> None:
    changed = _difference(one.tensors, other.tensors)
    if changed:
        raise _BrokenError(f"{what}: {changed}.")
    for log in ("metrics", "ledger", "faults"):
        here, there = getattr(one, log), getattr(other, log)
        if len(here) != len(there):
            raise _BrokenError(f"{what}: {len(here)} and {len(there)} records of {log}.")
        for a, b in zip(here, there, strict=True):
            if a != b:
                raise _BrokenError(f"{what}: {log} {a} and {b}.")


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """The name of the first tensor that differs by a bit; empty if none does."""
    for name in [*one, *other]:
        if not _equal(one.get(name), other.get(name)):
            return name
    return ""


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        bits = (one.shape, one.dtype) == (other.shape, other.dtype)
        return bits and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


def _close(one: Tensor, other: Tensor) -> bool:
    scale = 1.0 + float(one.double().abs().max()) if one.numel() else 1.0
    return one.shape == other.shape and bool(
        ((one.double() - other.double()).abs() <= _ARRIVAL * scale).all()
    )


def _check_finite(outcome: _Outcome) -> None:
    for name, tensor in outcome.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise _BrokenError(f"NaN or infinity in {name}.")


def _ways(outcome: _Outcome, *, without: Name) -> set[tuple[int, Name, Name]]:
    ways = {(c["tick"], c["source"], c["to"]) for c in outcome.ledger}
    return {way for way in ways if without not in way}


def _plain_spec(spec: Spec) -> dict[str, tuple[tuple[int, ...], str]]:
    return {n: (s.shape, str(s.dtype).removeprefix("torch.")) for n, s in spec.items()}


def _spoil(message: Message) -> Message:
    tensors = message.tensors.items()
    return Message({n: t * float("nan") if t.is_floating_point() else t for n, t in tensors})


def _is_spoilt(message: Message) -> bool:
    return any(bool(t.isnan().any()) for t in message.tensors.values() if t.is_floating_point())


def _portrait(node: Node) -> dict[str, Any]:
    """Everything about a node that a run could change."""
    net, about = node.model.net, {"seed": node.seed, "notes": dict(node.notes)}
    tensors = {f"'{name}'": t for name, t in node.model.state().items()}
    tensors |= {f"memory '{name}'": t.clone() for name, t in node.memory.items()}
    for name, split in node.data.items():
        tensors[f"the inputs of '{name}'"] = split.x.clone()
        if split.y is not None:
            tensors[f"the labels of '{name}'"] = split.y.clone()
    modes = {f"the mode of '{name}'": module.training for name, module in net.named_modules()}
    moving = {f"requires_grad of '{name}'": p.requires_grad for name, p in net.named_parameters()}
    return {**about, **tensors, **modes, **moving}


def _leaks(sent: Tensor, x: Tensor, y: Tensor | None) -> bool:
    """Whether a tensor shares memory with private data, or holds an input or all labels."""
    private = [x] if y is None else [x, y]
    place = sent.untyped_storage().data_ptr()
    if place and any(place == p.untyped_storage().data_ptr() for p in private):
        return True
    rows = x.flatten(1) if x.dim() > 1 and x[:1].numel() > 1 else x.reshape(1, -1)
    secrets = [rows] if y is None else [rows, y.reshape(1, -1)]
    layouts = [sent.flatten(), *([sent.T.flatten()] if sent.dim() == 2 else [])]
    return any(_holds(flat.double(), rows.double()) for flat in layouts for rows in secrets)


def _holds(flat: Tensor, rows: Tensor) -> bool:
    """Whether some row (that is not constant) stands in `flat` as it is."""
    rows = rows[(rows != rows[:, :1]).any(1)]
    width = rows.shape[1]
    if not len(rows) or len(flat) < width:
        return False
    windows = flat.unfold(0, width, 1)
    windows = windows[torch.isin(windows[:, 0], rows[:, 0])]
    return any(bool((row == windows).all(1).any()) for row in rows)
