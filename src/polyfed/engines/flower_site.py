"""What the Flower engine reads: the files of the peer engine, and who plays what on Flower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from polyfed import methods, options, topologies
from polyfed.core.topology import Topology
from polyfed.engines.charter import Charter
from polyfed.engines.site import EMPTY, Federation, Site, read_site
from polyfed.errors import ConfigError
from polyfed.record.files import read_yaml

HUB = "hub"
PORT = 9092


def read_hub(path: Path) -> tuple[Site, Federation]:
    """The hub's site file, or a federation file: then its files have the usual names beside it."""
    path = path.resolve()
    values = read_yaml(path, EMPTY)
    if "federation" in values:
        return read_site(path)
    federation = options.build(Federation, values, f"federation file {path}")
    beside = path.parent
    site = Site(
        name=federation.host or HUB,
        federation=path,
        listen=(f"tls/0.0.0.0:{PORT}",),
        authority=beside / "ca.pem",
        certificate=beside / f"{federation.host or HUB}.pem",
        key=beside / f"{federation.host or HUB}.key",
        folder=beside / f"run-{federation.host or HUB}",
    )
    return site, federation


def charter_of(federation: Federation) -> Charter:
    """What all agree on; on Flower it is always the hub that plays the places of the topology."""
    if federation.host in federation.nodes:
        raise ConfigError(
            f"host {federation.host} is a node. On Flower the hub plays the places of the "
            "topology: leave host out, or write host: hub."
        )
    name = federation.topology or methods.load(federation.method).topologies[0]
    if type(topologies.make(name)).places is Topology.places:
        return federation.charter()
    return replace(federation, host=federation.host or HUB).charter()


def flower_folder(site: Site) -> Path:
    """Where Flower's own files lie, beside the run folder."""
    return site.folder.with_name(site.folder.name + "-flower")
