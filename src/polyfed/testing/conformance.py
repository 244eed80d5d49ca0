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
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from polyfed import options
from polyfed.core.message import Message, Spec
from polyfed.core.method import Method
from polyfed.core.node import Name, Node
from polyfed.core.phase import Phase
from polyfed.engines.run import plain
from polyfed.record import Recorder
from polyfed.testing.federations import one_class, one_sample, stackable, tiny
from polyfed.testing.outcome import (
    BrokenError,
    Keeper,
    Outcome,
    check_finite,
    check_same,
    difference,
    engine_for,
    is_close,
    outcome_of,
    portrait,
)
from polyfed.train.together import StackWarning

Nodes = Callable[[int], Sequence[Node]]
Check = Callable[[Method, Nodes], None]

CHECKS: dict[str, Check] = {}
_ROUNDS = 2


class ConformanceError(AssertionError):
    """A method breaks a rule: says which check, and how."""


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
            except BrokenError as why:
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
    first = outcome_of(method, nodes(0))
    if not torch.equal(before, torch.random.get_rng_state()):
        raise BrokenError("the run moved torch's global generator; use node.stream(...).")
    torch.rand(7)  # a second run finds the global generator elsewhere, and used objects
    again = outcome_of(method, nodes(0))
    check_same(first, again, "two runs with the same seed differ")


@_check("seeds")
def _seeds(method: Method, nodes: Nodes) -> None:
    one, other = outcome_of(method, nodes(0), seed=0), outcome_of(method, nodes(0), seed=1)
    if not difference(one.tensors, other.tensors):
        raise BrokenError("seeds 0 and 1 end in the same models.")


@_check("resume")
def _resume(method: Method, nodes: Nodes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        keeper = Keeper(Path(scratch))
        recorder = Recorder.create(keeper.folder, {"method": method.name})
        whole = outcome_of(copy.deepcopy(method), nodes(0), progress=keeper, recorder=recorder)
        recorder.close()
        for tick in range(_ROUNDS + 1):
            engine = engine_for(copy.deepcopy(method), nodes(0))
            engine.recorder, point = Recorder.reopen(keeper.copy_of(tick))
            engine.run(point)
            engine.recorder.close()
            check_same(whole, Outcome.of(engine), f"a run continued after tick {tick} differs")


@_check("declared")
def _declared(method: Method, nodes: Nodes) -> None:
    announced: dict[tuple[str, Name], list[Any]] = {}

    def noted(said: str) -> Callable[[Node], Spec]:
        def spec(node: Node) -> Spec:
            found: Spec = getattr(method, said)(node)
            announced.setdefault((said, node.name), []).append(_plain_spec(found))
            return found

        return spec

    engine = engine_for(method, nodes(0), spied={said: noted(said) for said in ("sends", "hears")})
    engine.run()
    for fault in engine.recorder.faults.records:
        raise BrokenError(f"an ordinary run has a fault: {fault}")
    for crossing in engine.recorder.ledger.crossings():
        is_up = crossing.source in engine.nodes
        said, node = ("sends", crossing.source) if is_up else ("hears", crossing.to)
        got = {t["name"]: (tuple(t["shape"]), t["dtype"]) for t in crossing.tensors}
        if got not in announced[said, node]:
            raise BrokenError(
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
                    raise BrokenError(
                        f"'{name}', sent by {node.name}, holds values of its private split "
                        f"'{split}'."
                    )
        return message

    engine_for(method, nodes(0), spied={"send": send}).run()


@_check("node order")
def _node_order(method: Method, nodes: Nodes) -> None:
    listed, reversed_ = outcome_of(method, nodes(0)), outcome_of(method, list(nodes(0))[::-1])
    check_same(listed, reversed_, "listing the nodes in reverse gives another result")


@_check("arrival order")
def _arrival_order(method: Method, nodes: Nodes) -> None:
    def combine(
        place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        backwards = dict(reversed(list(got.items())))
        other = method.combine(copy.deepcopy(place), backwards, list(to)[::-1])
        replies = method.combine(place, got, to)
        if replies.keys() != other.keys():
            raise BrokenError("`combine` answers other nodes when messages arrive in reverse.")
        for name, reply in replies.items():
            for key, tensor in reply.tensors.items():
                if not is_close(tensor, other[name].tensors[key]):
                    raise BrokenError(
                        f"`combine` tells {name} another '{key}' when messages arrive in reverse."
                    )
        return replies

    engine_for(method, nodes(0), spied={"combine": combine}).run()


@_check("frozen")
def _frozen(method: Method, nodes: Nodes) -> None:
    def watched(phases: Callable[..., Iterable[Phase]]) -> Callable[..., Iterator[Phase]]:
        def watch(node: Node, *message: Message) -> Iterator[Phase]:
            for phase in phases(node, *message):
                model = node.model
                rest = [p for p in model.parts if phase.parts and p not in phase.parts]
                before = model.state(*rest) if rest else {}
                yield phase
                changed = difference(before, model.state(*rest) if rest else {})
                if changed:
                    raise BrokenError(
                        f"phase '{phase.label}' moves {', '.join(phase.parts)}, but changed "
                        f"{changed} of node {node.name}."
                    )

        return watch

    stages = ("start", "local", "receive", "finish")
    engine_for(method, nodes(0), spied={s: watched(getattr(method, s)) for s in stages}).run()


@_check("one sample")
def _one_sample(method: Method, nodes: Nodes) -> None:
    check_finite(outcome_of(method, one_sample(nodes(0))))


@_check("one class")
def _one_class(method: Method, nodes: Nodes) -> None:
    check_finite(outcome_of(method, one_class(nodes(0))))


@_check("absent")
def _absent(method: Method, nodes: Nodes) -> None:
    def combine(
        place: Node, got: Mapping[Name, Message], to: Sequence[Name]
    ) -> Mapping[Name, Message]:
        replies = method.combine(place, got, to)
        if not set(replies) <= set(to):
            raise BrokenError(f"`combine` answers {sorted(set(replies) - set(to))}, not asked.")
        return replies

    names = sorted(node.name for node in nodes(0))
    away = {1: (names[0],), 2: (names[-1],)}
    engine = engine_for(method, nodes(0), absent=away, spied={"combine": combine})
    engine.run()
    outcome = Outcome.of(engine)
    check_finite(outcome)
    for tick, (name,) in away.items():
        said = {"tick": tick, "node": name, "fault": "absent"} in outcome.faults
        if name in engine.nodes and not said:
            raise BrokenError(f"{name} was away at tick {tick}, but faults do not say so.")


@_check("nan")
def _nan(method: Method, nodes: Nodes) -> None:
    ordinary = outcome_of(method, nodes(0))
    victim = min(node.name for node in method.prepare(nodes(0)))
    spoiled: list[Message] = []

    def send(node: Node) -> Message:
        message = method.send(node)
        if node.name != victim or spoiled:
            return message
        spoiled.append(_spoil(message))
        return spoiled[0]

    engine = engine_for(method, nodes(0), spied={"send": send})
    engine.run()
    if not any(_is_spoilt(message) for message in spoiled):
        return  # it says nothing, or nothing that could be NaN
    outcome = Outcome.of(engine)
    refused = [f["node"] for f in outcome.faults if f["fault"] == "message refused"]
    if refused != [victim]:
        raise BrokenError(f"{victim} sent NaN once, but messages were refused from {refused}.")
    check_finite(outcome)
    missing = _ways(ordinary, without=victim) - _ways(outcome, without=victim)
    if missing:
        raise BrokenError(f"{victim} sent NaN, and these (tick, from, to) fell out: {missing}.")


@_check("stacked")
def _stacked(method: Method, nodes: Nodes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StackWarning)
        alone, stacked = (
            outcome_of(method, list(map(stackable, nodes(0))), stack=way)
            for way in ("never", "always")
        )
    for name, tensor in alone.tensors.items():
        if not is_close(tensor, stacked.tensors[name]):
            raise BrokenError(
                f"{name} differs where equal networks were trained as one computation: is `losses` "
                "of an objective what the objective is the mean of?"
            )


@_check("zero rounds")
def _zero_rounds(method: Method, nodes: Nodes) -> None:
    method = replace(method, rounds=0)
    given = [node.model.state() for node in nodes(0)]
    engine = engine_for(method, nodes(0))
    before = Outcome.of(engine).tensors
    engine.run()
    changed = difference(before, Outcome.of(engine).tensors)
    if changed:
        raise BrokenError(f"nothing was asked for, but {changed} changed.")
    if len(engine.recorder.ledger):
        raise BrokenError("nothing was asked for, but messages crossed.")
    for node in engine.nodes.values():
        for view in method.views(node).values():
            for name, tensor in view.model.state().items():
                known = [state[name] for state in given if name in state]
                if known and not any(torch.equal(tensor, other) for other in known):
                    raise BrokenError(f"`prepare` changed '{name}' of {view.name}.")


@_check("options")
def _options(method: Method, nodes: Nodes) -> None:
    written = yaml.safe_load(yaml.safe_dump(plain(method)))
    read = options.build(type(method), written, f"method {method.name}")
    if read != method:
        raise BrokenError(f"written to config.yaml and read again, it is {read}, not {method}.")


@_check("nodes")
def _nodes(method: Method, nodes: Nodes) -> None:
    given = list(nodes(0))
    for node in given:
        for module in list(node.model.net.modules())[1::2]:
            module.training = False  # modes are the caller's too
    before = [portrait(node) for node in given]
    engine_for(method, given).run()
    for node, once in zip(given, before, strict=True):
        changed = difference(once, portrait(node))
        if changed:
            raise BrokenError(f"after the run, {changed} of the caller's {node.name} differs.")


# --- messages -----------------------------------------------------------------------------------


def _ways(outcome: Outcome, *, without: Name) -> set[tuple[int, Name, Name]]:
    ways = {(c["tick"], c["source"], c["to"]) for c in outcome.ledger}
    return {way for way in ways if without not in way}


def _plain_spec(spec: Spec) -> dict[str, tuple[tuple[int, ...], str]]:
    return {n: (s.shape, str(s.dtype).removeprefix("torch.")) for n, s in spec.items()}


def _spoil(message: Message) -> Message:
    tensors = message.tensors.items()
    return Message({n: t * float("nan") if t.is_floating_point() else t for n, t in tensors})


def _is_spoilt(message: Message) -> bool:
    return any(bool(t.isnan().any()) for t in message.tensors.values() if t.is_floating_point())


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
