"""Site files: what one party of a run across machines has, and what all parties agree on.

    SITE.yaml          stays at the site: name, data and network, device, addresses, certificate
    FEDERATION.yaml    the same for all: method, topology, names of all nodes, seed

Paths in a file are relative to it. Every option is checked before anything is begun.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed import methods, options, tasks, topologies
from polyfed.core.node import Name, Node
from polyfed.engines.charter import Charter
from polyfed.errors import ConfigError, UnknownNameError
from polyfed.record.files import read_yaml

EMPTY = "options: write 'name: value' lines."  # what is said of a file without any


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What all parties agree on.

    Attributes:
        run: name of the run.
        method: its name.
        nodes: names of all nodes.
        options: the method's hyper-parameters.
        topology: its name and options; none is the method's first.
        host: who plays the places of the topology, such as the hub of a star.
        seed: same seed, same numbers.
        evaluate_every: rounds between evaluations.
        grace: seconds that a party may be gone before the others go on without it.
        patience: seconds without progress after which a party ends, to go on when started again.
        resend: seconds after which a small message that was not confirmed is sent again.
        largest: bytes of the largest message that is taken.
    """

    run: str
    method: str
    nodes: tuple[Name, ...]
    options: dict[str, Any] = field(default_factory=dict)
    topology: str | None = None
    host: Name | None = None
    seed: int = 0
    evaluate_every: int = 1
    grace: float = 10.0
    patience: float = 600.0
    resend: float = 1.0
    largest: int = 1 << 31

    def charter(self) -> Charter:
        """The same with the things themselves."""
        method = methods.make(self.method, self.options)
        names = (self.run, *self.nodes, *([self.host] if self.host else []))
        for name in names:
            if not all(c.isalnum() or c in "_.-" for c in name) or not name:
                raise ConfigError(f"name {name!r}: use letters, digits, '.', '_' and '-' only.")
        return Charter(
            run=self.run,
            method=method,
            topology=topologies.make(self.topology or method.topologies[0]),
            nodes=tuple(sorted(self.nodes)),
            host=self.host,
            seed=self.seed,
            evaluate_every=self.evaluate_every,
            grace=self.grace,
            patience=self.patience,
            resend=self.resend,
            largest=self.largest,
        )


@dataclass(frozen=True, kw_only=True)
class Site:
    """What one party has.

    Attributes:
        name: of the party.
        federation: file with what all agree on.
        node: what makes its data and network: a ready task such as heart, of which it is the node
            of that name, or package.module:function, called with the name and the seed; none for a
            hub without data.
        node_options: of the task, or more arguments of the function.
        device: cpu, cuda, cuda:0, ...
        listen: addresses under which others reach it, tls/0.0.0.0:7447.
        connect: addresses of some others, tls/hub.example.org:7447.
        authority: certificate of whoever signed all certificates.
        certificate: the party's own; its common name is the party's name.
        key: the private key of that.
        folder: where the run is written.
    """

    name: Name
    federation: Path
    node: str | None = None
    node_options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    folder: Path = Path("run")

    def make(self, seed: int) -> Node | None:
        """The party's own data and network."""
        if self.node is None:
            return None
        if ":" in self.node:
            made = _function(self.node)(self.name, seed, **self.node_options)
            if not isinstance(made, Node):
                raise ConfigError(f"{self.node} returned {type(made).__name__}, expected a Node.")
            return made
        nodes = {n.name: n for n in tasks.make(self.node, self.node_options).nodes(seed)}
        if self.name not in nodes:
            raise UnknownNameError(f"node of task {self.node}", self.name, nodes)
        return nodes[self.name]

    def check_security(self) -> None:
        """Raise unless there are certificates, and all addresses are encrypted ones."""
        for name in ("authority", "certificate", "key"):
            path = getattr(self, name)
            if path is None or not path.exists():
                raise ConfigError(
                    f"site {self.name}: {name} is {path or 'not given'}. Peers prove who they are "
                    "with certificates; to go without, type --insecure."
                )
        for address in (*self.listen, *self.connect):
            if not address.startswith(("tls/", "quic/")):
                raise ConfigError(
                    f"site {self.name}: address {address} is not encrypted. Write tls/HOST:PORT; "
                    "to go without, type --insecure."
                )


def read_site(path: Path) -> tuple[Site, Federation]:
    """A site file and the federation it names."""
    site = options.build(Site, read_yaml(path, EMPTY), f"site file {path}")
    base = path.resolve().parent
    moved = {
        name: base / value
        for name in ("federation", "authority", "certificate", "key", "folder")
        if (value := getattr(site, name)) is not None
    }
    site = Site(**{**vars(site), **moved})
    if not (site.listen or site.connect):
        raise ConfigError(f"{path}: give at least one address to listen or to connect to.")
    values = read_yaml(site.federation, EMPTY)
    return site, options.build(Federation, values, f"federation file {site.federation}")


def _function(text: str) -> Any:
    """The function that package.module:function names; modules beside the process are found."""
    module, _, name = text.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"node {text}: {error}. Write package.module:function.") from error
