"""Model: any `nn.Module`, split into named parts by module names, without rewriting it.

A part owns the parameters and buffers of its modules: BatchNorm statistics travel with their part.
What leaves a part is, by definition, what enters the next one, so a functional step between two
modules (a flatten, a pooling) belongs to the part before it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyfed.core.message import Spec, TensorSpec
from polyfed.errors import ModelError, UnknownNameError

Precision = Literal["float32", "bfloat16"]


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; every module's mode is put back afterwards."""
    with _modes_kept(net), torch.no_grad():
        net.eval()
        yield


@contextmanager
def _modes_kept(net: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in net.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _ReachedError(Exception):
    """Carries the value that enters a part out of the forward pass."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Model:
    """A network and its named parts, in the order the data passes through them.

    Attributes:
        net: the network.
        parts: names of its modules, by part.
        precision: in what the network computes; its parameters, its output and all mathematics
            outside of it are as the network was made.
    """

    def __init__(
        self,
        net: nn.Module,
        parts: Mapping[str, tuple[str, ...]],
        precision: Precision = "float32",
    ) -> None:
        self.net, self.precision = net, precision
        self.parts = dict(parts)
        self._names = {part: _owned(net, modules) for part, modules in self.parts.items()}
        _check_cover(net, self._names)

    @classmethod
    def split(cls, net: nn.Module, **parts: str | Sequence[str] | EllipsisType) -> Model:
        """Name the parts of a network by its module names; `...` stands for everything else.

        Args:
            net: any network; it is used as it is.
            parts: part name = module name, several module names, or `...`, in forward order.

        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> Model.split(net, trunk=..., head="2").names("trunk")
        ['0.weight', '0.bias']
        """
        if not isinstance(net, nn.Module):
            raise ModelError(f"a network is an nn.Module such as nn.Linear(4, 2), got {net!r}.")
        rest = [part for part, modules in parts.items() if modules is ...]
        if len(rest) > 1:
            raise ModelError(f"only one part can be '...' (the rest), got {', '.join(rest)}.")
        chosen = {p: _as_names(m) for p, m in parts.items() if not isinstance(m, EllipsisType)}
        if rest:
            taken = {name for modules in chosen.values() for name in modules}
            chosen[rest[0]] = _complement(net, taken)
        return cls(net, {part: chosen[part] for part in parts})

    @classmethod
    def none(cls) -> Model:
        """The model of a node that has no network, such as a plain hub."""
        return cls(nn.Identity(), {})

    def __call__(self, x: Tensor) -> Tensor:
        """The network's output."""
        return self.compute(self.net, x)

    def compute(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What the network, or a module of it, makes of `x`, in the model's precision.

        bfloat16 is PyTorch's autocast, with the channels of pictures last; what comes out is
        float32 again.
        """
        if self.precision == "float32":
            return module(x)
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return _widened(module(_channels_last(x)))

    def output(self, x: Tensor, part: str) -> Tensor:
        """What leaves `part` when `x` enters the network: the input of the part after it."""
        self.check_parts([part])
        order = list(self.parts)
        following = order[order.index(part) + 1 :]
        if not following:
            return self(x)
        try:
            with self._on_entry({following[0]: _raise_input}):
                self(x)
        except _ReachedError as reached:
            return _widened(reached.value)
        raise ModelError(
            f"the forward pass never reached part '{following[0]}' "
            f"({', '.join(self.parts[following[0]])}), so part '{part}' has no output."
        )

    def order(self, x: Tensor) -> list[str]:
        """The parts that have modules, in the order in which `x` enters them."""
        met: dict[str, None] = {}

        def enters(part: str) -> Callable[..., None]:
            return lambda *_: met.setdefault(part)

        with self._on_entry({part: enters(part) for part in self.parts}):
            self(x)
        return list(met)

    @contextmanager
    def _on_entry(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Call a function whenever a part's modules are called."""
        handles = [  # also on what the modules contain: a ModuleList itself is never called
            inner.register_forward_pre_hook(hook, with_kwargs=True)
            for part, hook in hooks.items()
            for module in self._modules(part)
            for inner in module.modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def output_size(self, x: Tensor, part: str) -> int:
        """Width of what leaves `part`; it must be one vector per sample."""
        with evaluating(self.net):
            out = self.output(x, part)
        if out.dim() != 2:
            raise ModelError(
                f"part '{part}' puts out {list(out.shape[1:])} per sample, expected one vector. "
                "End it with a flatten or a linear layer."
            )
        return out.shape[1]

    def names(self, *parts: str) -> list[str]:
        """Names of the parameters and buffers of these parts (of all, if none is given)."""
        return list(self._stored(parts))

    def parameters(self, *parts: str) -> list[nn.Parameter]:
        """The trainable parameters of these parts (of all, if none is given)."""
        wanted = set(self.names(*parts))
        return [p for name, p in self.net.named_parameters() if name in wanted]

    def state(self, *parts: str, copied: bool = True) -> dict[str, Tensor]:
        """The parameters and buffers of these parts (of all, if none is given).

        Args:
            parts: names of parts.
            copied: a copy; else the tensors themselves, for those who only read them at once.
        """
        chosen = self._stored(parts)
        return {name: t.clone() for name, t in chosen.items()} if copied else chosen

    def spec(self, *parts: str) -> Spec:
        """Names, shapes and dtypes of what `state` returns."""
        return {name: TensorSpec.of(t) for name, t in self._stored(parts).items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters and buffers they name; the others stay."""
        everything = self.net.state_dict()
        for name, value in state.items():
            if name not in everything:
                raise UnknownNameError("parameter", name, everything)
            if everything[name].shape != value.shape:
                raise ModelError(
                    f"'{name}' has shape {list(everything[name].shape)} here, "
                    f"got {list(value.shape)}."
                )
        with torch.no_grad():
            for name, value in state.items():
                everything[name].copy_(value)

    @contextmanager
    def moving(self, *parts: str) -> Iterator[list[nn.Parameter]]:
        """As `move`, until the context is left."""
        before = [(p, p.requires_grad) for p in self.net.parameters()]
        with _modes_kept(self.net):
            try:
                yield self.move(*parts)
            finally:
                for p, required in before:
                    p.requires_grad_(required)

    def move(self, *parts: str) -> list[nn.Parameter]:
        """Train these parts only: the others are frozen and in eval mode (no dropout, no drift).

        A parameter that its owner froze stays frozen.
        """
        self.check_parts(parts)
        moving = parts or tuple(self.parts)
        parameters = [p for p in self.parameters(*moving) if p.requires_grad]
        if not parameters:
            raise ModelError(f"part '{', '.join(moving)}' has no parameter to train.")
        for p in self.net.parameters():
            p.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        self.net.train()
        for part in self.parts.keys() - set(moving):
            for module in self._modules(part):
                module.eval()
        return parameters

    def copy(self) -> Model:
        """An independent copy with the same values."""
        hooks = (v for m in self.net.modules() for v in vars(m).values() if type(v) is OrderedDict)
        known = {id(each): OrderedDict[Any, Any]() for each in hooks if not each}
        twin = copy.copy(self)
        twin.net, twin.parts = copy.deepcopy(self.net, known), dict(self.parts)
        return twin

    def _stored(self, parts: Iterable[str]) -> dict[str, Tensor]:
        """The parameters and buffers of these parts (of all, if none is given) themselves."""
        self.check_parts(parts)
        wanted = {n for p in (parts or self.parts) for n in self._names[p]}
        return {name: t for name, t in self.net.state_dict().items() if name in wanted}

    def _modules(self, part: str) -> Iterator[nn.Module]:
        known = dict(self.net.named_modules(remove_duplicate=False))
        return (known[name] for name in self.parts[part] if name in known)

    def check_parts(self, parts: Iterable[str]) -> None:
        """Raise if a part is none of the model's."""
        for part in parts:
            if part not in self.parts:
                raise UnknownNameError("part", part, self.parts)


def _raise_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ReachedError(next(iter((*args, *kwargs.values()))))


def _channels_last(x: Tensor) -> Tensor:
    """Pictures as convolutions like them; written so that `vmap` can do it too."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() == 4 else x


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def _as_names(modules: str | Sequence[str]) -> tuple[str, ...]:
    names = (modules,) if isinstance(modules, str) else modules
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"a part is a module's name, several names, or '...', got {modules!r}. Names stand in "
            "[name for name, _ in net.named_modules()]; of a Sequential they are '0', '1', ..."
        )
    return tuple(names)


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _owned(net: nn.Module, modules: tuple[str, ...]) -> frozenset[str]:
    known = {n for n, _ in net.named_modules(remove_duplicate=False)} | set(net.state_dict())
    for module in modules:
        if module not in known:
            raise UnknownNameError("module", module, (n for n, _ in net.named_children()))
    return frozenset(n for n in net.state_dict() if any(_within(n, m) for m in modules))


def _complement(net: nn.Module, taken: set[str]) -> tuple[str, ...]:
    """The largest modules (and bare parameters) that contain nothing of what is taken."""
    stored = set(net.state_dict())  # without buffers that are not persistent

    def walk(prefix: str, module: nn.Module) -> Iterator[str]:
        for name, child in module._modules.items():  # named_children leaves shared ones out
            path = f"{prefix}{name}"
            if child is None or path in taken:
                continue
            if any(t.startswith(path + ".") for t in taken):
                yield from walk(path + ".", child)
            else:
                yield path
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        paths = [f"{prefix}{n}" for n, _ in own]
        yield from (path for path in paths if path in stored and path not in taken)

    return tuple(walk("", net))


def _check_cover(net: nn.Module, names: Mapping[str, frozenset[str]]) -> None:
    if any(map(is_lazy, net.parameters())):
        raise ModelError(
            "the network has lazy modules, whose weights do not exist yet. Fix: call it once on a "
            "batch, inside polyfed.random.ambient(0, 'init'), and split it then."
        )
    for name in net.state_dict():
        owners = [part for part, owned in names.items() if name in owned]
        if not owners:
            raise ModelError(
                f"'{name}' belongs to no part. Name its module in one of {', '.join(names)}, "
                "or give one part as '...' (everything else)."
            )
        if len(owners) > 1:
            raise ModelError(f"'{name}' belongs to several parts: {', '.join(owners)}.")
