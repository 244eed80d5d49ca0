"""The gate before round 0: everything about a federation that can be known before training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polyfed.check import is_whole
from polyfed.core.data import Data, Split
from polyfed.core.message import TensorSpec
from polyfed.core.method import Method
from polyfed.core.model import Model, evaluating
from polyfed.core.node import Name, Node
from polyfed.errors import ConfigError, DataError, ModelError, UnknownNameError
from polyfed.tasks import Task
from polyfed.train import outputs

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPLITS = ("train", "val_es", "val_rb", "test", "public", "probe")
_SCORED = ("val_rb", "test")
_OTHERWISE = "If this is no classification, say how it is scored: pf.Node(score=...)."


def check_is_method(method: object) -> Method:
    """The method, if it is one with its hyper-parameters: no class, no name."""
    if not isinstance(method, Method):
        raise ConfigError(
            f"a method is made with its options, such as pf.FedAvg(rounds=5), got {_shown(method)}."
            " Fix: call the class; from a name, pf.methods.make('fedavg', {'rounds': 5})."
        )
    return method


def federation(task: Task | Sequence[Node], seed: int) -> list[Node]:
    """The nodes of a task for a seed, or a person's own."""
    made = task.nodes(seed) if isinstance(task, Task) else task
    nodes = list(made) if isinstance(made, Iterable) else [made]
    for node in nodes:
        if not isinstance(node, Node):
            raise ConfigError(
                f"a federation is a list of pf.Node or a task, got {_shown(node)}. Fix: "
                "[pf.Node('a', data, model), ...], or call the task: pf.tasks.digits()."
            )
    return nodes


def _shown(thing: object) -> str:
    kind = "class" if isinstance(thing, type) else type(thing).__name__
    return repr(thing) if isinstance(thing, str) else f"{kind} {getattr(thing, '__name__', '')}"


def plain_seed(seed: object) -> int:
    """The seed as Python's own integer: streams are named by what is written, 0 or '0'."""
    if not is_whole(seed):
        raise ConfigError(f"a seed must be a whole number, got {seed!r}.")
    return int(seed)  # type: ignore[call-overload, no-any-return]


def check_absent(absent: Mapping[int, Sequence[Name]]) -> dict[int, tuple[Name, ...]]:
    """Who is away, by round."""
    if isinstance(absent, Mapping) and all(map(is_whole, absent)):
        return {int(t): tuple(names) for t, names in absent.items()}
    raise ConfigError(f"absent must be names by round, such as {{3: ['M1']}}, got {absent!r}.")


def check_federation(nodes: Sequence[Node]) -> None:
    """Raise, naming the node and the cause, unless every node can train and be evaluated."""
    if not nodes:
        raise ConfigError("a federation needs at least one node, got none.")
    for node in nodes:
        _check_kinds(node)
    names = [node.name for node in nodes]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"node name {name!r}: use letters, digits, '.', '_' and '-' only.")
        if names.count(name) > 1:
            raise ConfigError(f"two nodes are called {name}. Names must be unique.")
    for node in nodes:
        _check_node(node)


def _check_kinds(node: Node) -> None:
    """Each field is what it is taken for."""
    if not isinstance(node.name, str):
        raise ConfigError(f"node name {node.name!r}: expected a text, such as 'M{node.name}'.")
    if not isinstance(node.data, Data):
        raise DataError(
            f"node {node.name}: its data are a {type(node.data).__name__}. Name the splits: "
            "pf.Data(train=(x, y), test=(xt, yt))."
        )
    if not isinstance(node.model, Model) or not node.model.parts:
        got = "missing" if isinstance(node.model, Model) else f"a {type(node.model).__name__}"
        raise ModelError(
            f"node {node.name}: its model is {got}. Name the parts of a network: "
            "pf.Model.split(net, trunk=..., head='NAME'), NAME being its last module."
        )


def _check_node(node: Node) -> None:
    if "train" not in node.data:
        raise DataError(f"node {node.name} has no split 'train'. Its splits: {_listed(node.data)}.")
    for name in node.data:
        if name not in _SPLITS and not name.startswith("own_"):
            raise UnknownNameError(f"data split of node {node.name}", name, [*_SPLITS, "own_..."])
    known = {name: split for name, split in node.data.items() if name in _SPLITS}
    shape = _output_shape(node, known)
    for name, split in known.items():
        if split.y is None and name in _SCORED:
            raise DataError(f"node {node.name}, split '{name}' has no labels: accuracy needs them.")
        if split.y is not None and name != "public":
            _check_labels(node, name, split.y, shape)
    _check_order(node)
    node.data.check(node.name)


def _check_labels(node: Node, name: str, y: Tensor, shape: torch.Size) -> None:
    """Class numbers within the network's outputs, or what else can be learnt and scored."""
    place = f"node {node.name}, split '{name}'"
    if y.dim() == 1 and not y.is_floating_point():
        width, low, high = (shape or (1,))[-1], int(y.min()), int(y.max())
        if low < 0 or high >= width:
            raise DataError(
                f"{place}: labels run from {low} to {high}, but the network has {width} "
                f"output{'s' * (width > 1)} (labels 0 to {width - 1}). Relabel the data, or widen "
                "the head: an output for every class, two for yes and no."
            )
        if len(shape) != 1 and node.score is None:
            raise ModelError(
                f"{place}: the labels are classes, but the network of node {node.name} puts out "
                f"{list(shape)} a sample, expected one number for every class. {_OTHERWISE}"
            )
    elif node.score is None:
        is_target = y.is_floating_point() and name not in _SCORED and y.shape[1:] == shape
        if not is_target and (y.shape[1:], shape) != ((), (1,)):
            fix = "long()" if y.dim() == 1 else "squeeze(1)" if y.shape[1] == 1 else "argmax(1)"
            raise DataError(
                f"{place}: labels are {TensorSpec.of(y)}, expected whole class numbers, one a "
                f"sample: int64[{len(y)}]. Fix: y.{fix}. {_OTHERWISE}"
            )


def _output_shape(node: Node, splits: Mapping[str, Split]) -> torch.Size:
    """Of a training sample; splits of another shape or dtype must pass too."""
    shapes: dict[tuple[torch.Size, torch.dtype], torch.Size] = {}
    for name in sorted(splits, key=lambda name: name != "train"):
        x = splits[name].x
        if (x.shape[1:], x.dtype) in shapes:
            continue
        try:
            shapes[x.shape[1:], x.dtype] = outputs(node.model, x[:1]).shape[1:]
        except Exception as error:  # whatever a person's own network raises
            why = str(error).partition("\n")[0] + _other_dtype(node, x)
            raise ModelError(
                f"the network of node {node.name} does not take its data, of shape "
                f"{list(x.shape[1:])} a sample in split '{name}': {why}"
            ) from error
    return next(iter(shapes.values()))


def _other_dtype(node: Node, x: Tensor) -> str:
    """A hint where inputs are no integers, as embeddings take, and not of the parameters' dtype."""
    own = next((p.dtype for p in node.model.net.parameters()), x.dtype)
    if x.dtype in (own, torch.int32, torch.int64):
        return ""
    return f". The inputs are {x.dtype}, the parameters {own}. Fix: x.to({own})."


def _check_order(node: Node) -> None:
    """What leaves a part is taken for what enters the part named next."""
    with evaluating(node.model.net):
        met = node.model.order(node.data["train"].x[:1])
    named = [part for part in node.model.parts if part in met]
    if met != named:
        raise ModelError(
            f"the parts of the network of node {node.name} are named in the order "
            f"{', '.join(named)}, but data pass through them in the order {', '.join(met)}. Fix: "
            f"Model.split(net, {', '.join(f'{part}=...' for part in met)})."
        )


def _listed(data: Data) -> str:
    return ", ".join(data) or "none"
