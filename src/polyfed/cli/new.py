"""`polyfed new method NAME` and `polyfed new site NAME`: files that work as they are."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from polyfed.cli.commands import app
from polyfed.cli.dynamic import Command
from polyfed.errors import ConfigError, RunError

new = typer.Typer(no_args_is_help=True, help="Write files to begin with: a method, a site.")
app.add_typer(new, name="new")

Named = Annotated[str, typer.Argument(metavar="NAME", help="what to call it")]
Into = Annotated[Path, typer.Option("--folder", help="where to write")]

_METHOD = Template('''"""$title: say in a sentence what nodes share and what becomes of it.

    w <- (1/K) sum_k theta_k        the paper's equations, with their numbers

Author Year, title, Algorithm N.
Symbols: theta_k = the network of node k, w = what it hears.
Limits: local_epochs=0 averages only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import polyfed as pf
from polyfed import check
from polyfed.core.message import Spec
from polyfed.maths.mixing import weighted_mean
from polyfed.train.agree import check_same_parts


@dataclass(frozen=True, kw_only=True)
class $cls(pf.Method):
    """Average whole networks: change this into your method.

    Attributes:
        local_epochs: epochs in each round.
    """

    name: ClassVar[str] = "$name"
    title: ClassVar[str] = "a line for `polyfed methods`"

    local_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, "local_epochs", 0)

    def check(self, nodes: Sequence[pf.Node]) -> None:
        """Raise, before any training, if the method cannot work on these nodes."""
        check_same_parts(nodes)

    def local(self, node: pf.Node) -> Iterable[pf.Phase]:
        """What a node trains in a round."""
        yield self.phase("local", epochs=self.local_epochs)

    def sends(self, node: pf.Node) -> Spec:
        """Names, shapes and dtypes of what leaves; nothing else may."""
        return node.model.spec()

    def send(self, node: pf.Node) -> pf.Message:
        """What leaves the node."""
        return pf.Message(node.model.state())

    def combine(
        self, place: pf.Node, got: Mapping[str, pf.Message], to: Sequence[str]
    ) -> Mapping[str, pf.Message]:
        """How messages meet: a reply for each of `to`."""
        mean = weighted_mean([m.tensors for m in got.values()], [1.0] * len(got))
        return dict.fromkeys(to, pf.Message(mean))

    def receive(self, node: pf.Node, message: pf.Message) -> Iterable[pf.Phase]:
        """What a node does with what it hears."""
        node.model.load(message.tensors)
        return ()


if __name__ == "__main__":
    method = $cls(rounds=5, batch=16, lr=3e-3, local_epochs=5)
    print(pf.compare([method, pf.Local(rounds=5)], pf.tasks.digits(), seeds=2).table())
''')

_METHOD_TEST = Template('''"""Whether $name is a good citizen, and computes what its paper says."""

import polyfed as pf
import pytest
import torch
from $module import $cls
from polyfed.testing import CHECKS, tiny

SMALL = {"batch": 8, "lr": 1e-2}


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check]($cls(**SMALL), tiny)


def test_against_numbers_that_somebody_can_derive() -> None:
    """As it stands it is FedAvg with uniform weights; put your method's own limits here."""
    ours = pf.run($cls(rounds=2, **SMALL), tiny(0))
    theirs = pf.run(pf.FedAvg(rounds=2, weighting="uniform", **SMALL), tiny(0))
    for name, node in ours.nodes.items():
        other = theirs.nodes[name].model.state()
        for key, value in node.model.state().items():
            torch.testing.assert_close(value, other[key])
''')

_SITE = Template("""# What the site $name has; this file stays here. Use: polyfed peer $name.yaml
name: $name
federation: federation.yaml       # the same file at every site
node: $module:make                # data and network, in $module.py beside this file
device: cpu
listen: [tls/0.0.0.0:7447]        # under which others reach this site
connect: []                       # some of the others: [tls/other.example.org:7447]
authority: certificates/ca.pem    # of whoever signed all certificates
certificate: certificates/$name.pem
key: certificates/$name.key
folder: run-$name                 # where the run and its ledger are written
""")

_FEDERATION = Template("""# What all sites agree on: the same file everywhere.
run: our-run
method: fedavg
options: {rounds: 5, batch: 16, lr: 3.0e-3, local_epochs: 2}
topology: star
host: $name                       # who plays the hub
nodes: [$name]                    # add the others
seed: 0
""")

_SITE_CODE = Template('''"""Data and network of the site $name."""

import polyfed as pf
import torch
from torch import nn


def make(name: str, seed: int) -> pf.Node:
    """The node of this site; put your own data and network in place of these."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 8, generator=generator)
    y = (x[:, 0] > 0).long()
    data = pf.Data(
        train=(x[:120], y[:120]),
        val_es=(x[120:140], y[120:140]),
        val_rb=(x[140:160], y[140:160]),
        test=(x[160:], y[160:]),
    )
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    return pf.Node(name, data, pf.Model.split(net, trunk=["0", "1"], head="2"), ("no", "yes"))
''')

_SITE_TEST = Template('''"""Whether the site $name can take part: its node trains."""

from pathlib import Path

import polyfed as pf
from polyfed import methods
from polyfed.engines.site import read_site

HERE = Path(__file__).parent


def test_the_site_can_take_part(monkeypatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    site, federation = read_site(HERE / "$name.yaml")
    assert site.name in federation.nodes
    node = site.make(federation.seed)
    assert node is not None
    method = methods.make(federation.method, {**federation.options, "rounds": 1})
    run = pf.run(method, [node], seed=federation.seed)
    assert 0 <= run.accuracy[site.name] <= 1
''')


@new.command("method", cls=Command)
def method_command(name: Named, folder: Into = Path()) -> None:
    """Write a method and its test; the test passes as it is.

    Example: polyfed new method soft-average
    """
    module, cls = _names(name)
    words = {"name": name, "module": module, "cls": cls, "title": cls}
    files = {f"{module}.py": _METHOD, f"test_{module}.py": _METHOD_TEST}
    _write(folder, files, words)
    typer.echo(f"Try it with: pytest {folder / f'test_{module}.py'}")


@new.command("site", cls=Command)
def site_command(name: Named, folder: Into = Path()) -> None:
    """Write the files of a party that takes part across machines, and their test.

    Example: polyfed new site cleveland
    """
    module, _ = _names(name)
    words = {"name": name, "module": module}
    files = {
        f"{name}.yaml": _SITE,
        "federation.yaml": _FEDERATION,
        f"{module}.py": _SITE_CODE,
        f"test_{module}.py": _SITE_TEST,
    }
    _write(folder, files, words, kept=("federation.yaml",))
    typer.echo(f"Try it with: pytest {folder / f'test_{module}.py'}")


def _names(name: str) -> tuple[str, str]:
    """The module and the class of a name.

    >>> _names("soft-average")
    ('soft_average', 'SoftAverage')
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigError(f"name '{name}': use small letters, digits and '-', as soft-average.")
    return module, "".join(part.capitalize() for part in module.split("_"))


def _write(
    folder: Path, files: dict[str, Template], words: dict[str, str], kept: tuple[str, ...] = ()
) -> None:
    """Write the files; of what is there already only `kept` may stay."""
    for file in files:
        if (folder / file).exists() and file not in kept:
            raise RunError(f"{folder / file} exists: choose another name or --folder.")
    for file, template in files.items():
        path = folder / file
        if path.exists():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(template.substitute(words), encoding="utf-8")
        except OSError as error:
            raise RunError(f"could not write {path}: {error.strerror or error}.") from error
        typer.echo(f"written: {path}")
