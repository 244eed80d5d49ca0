"""What the peer engine costs: a round without work, and a large message, over TLS on loopback.

    python benchmarks/network.py [--rounds 60] [--megabytes 50] [--repeats 7] [--flower 8]

The fixed cost of a round: four peers (one of them the hub of a star), FedAvg without epochs, a tiny
network, run folders and checkpoints; the median time from decision to decision, as a peer sees it.
A large message: from `post` until it is confirmed through the engine's channel, against a bare
Zenoh put of as many bytes that is answered with one byte, and against `torch.distributed` (gloo,
neither encrypted nor authenticated). Transfers are taken in turn.

With `--flower N`, and nothing else then: N rounds of the same on Flower, `polyfed hub` and three
`polyfed node`, as the hub's metrics have them; with the tiny network, and with one of that many MB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from polyfed.core.message import Message
from polyfed.core.node import Node
from polyfed.engines.certificates import make_certificates
from polyfed.engines.channel import Channel
from polyfed.engines.peer import run_peer, zenoh_link
from polyfed.engines.site import read_site
from polyfed.engines.wire import Parcel, pack, unpack

NAMES = ("M0", "M1", "M2", "M3")


def node(name: str, seed: int) -> Node:
    """A node with next to nothing."""
    from polyfed.testing import tiny

    return Node(name, tiny()[0].data, tiny()[0].model.copy(), tiny()[0].classes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--flower", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.flower:
        on_flower(given.flower, given.megabytes)
        return
    with tempfile.TemporaryDirectory() as folder:
        sites = write_sites(Path(folder), given.rounds)
        spent = fixed_cost(sites)
        low, high = min(spent), max(spent)
        print(
            f"a round without work, 4 peers: {1e3 * statistics.median(spent):.1f} ms "
            f"({1e3 * low:.1f} to {1e3 * high:.1f}, {len(spent)} rounds)"
        )
        transfers(sites, given.megabytes, given.repeats)


def write_sites(folder: Path, rounds: int) -> list[Path]:
    """Site files of four peers."""
    make_certificates(folder, NAMES)
    options = {"rounds": rounds, "local_epochs": 0}
    federation: dict[str, Any] = {"run": "cost", "method": "fedavg", "nodes": list(NAMES)}
    federation |= {"options": options, "host": "M0", "evaluate_every": 1000}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    ports = free_ports(len(NAMES))
    sites = []
    for i, name in enumerate(NAMES):
        site: dict[str, Any] = {"name": name, "federation": "federation.yaml"}
        site |= {"node": f"{Path(__file__).stem}:node", "folder": f"run-{name}"}
        site |= {"listen": [f"tls/127.0.0.1:{ports[i]}"]}
        site |= {"connect": [f"tls/127.0.0.1:{port}" for port in ports[:i]]}
        site |= {"authority": "ca.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
        sites.append(folder / f"{name}.yaml")
        sites[-1].write_text(yaml.safe_dump(site))
    return sites


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


# ---- a round -------------------------------------------------------------------------------------


def fixed_cost(sites: list[Path]) -> list[float]:
    """Seconds from decision to decision, but for the first few, as the last peer sees them."""
    context = multiprocessing.get_context("fork")
    times = context.SimpleQueue()
    peers = [context.Process(target=peer, args=(site, times)) for site in sites]
    for each in peers:
        each.start()
    seen: list[float] = times.get()
    for each in peers:
        each.join()
    return [b - a for a, b in pairwise(seen[5:])]


def peer(site: Path, times: Any) -> None:
    """One peer; the last tells when it heard of each round."""
    os.chdir(Path(__file__).parent)
    seen: list[float] = []

    def shown(text: str) -> None:
        if text.startswith("round"):
            seen.append(time.perf_counter())

    run_peer(site, shown=shown)
    if site.stem == NAMES[-1]:
        times.put(seen)


# ---- on Flower -----------------------------------------------------------------------------------


def large(name: str, seed: int, megabytes: int) -> Node:
    """The same with a network of so many MB."""
    from polyfed.core.model import Model

    small = node(name, seed)
    inputs, classes = small.data["train"].x.shape[1], len(small.classes)
    width = megabytes * 250_000 // (inputs + classes)
    net = torch.nn.Sequential(torch.nn.Linear(inputs, width), torch.nn.Linear(width, classes))
    return Node(name, small.data, Model.split(net, trunk="0", head="1"), small.classes)


def on_flower(rounds: int, megabytes: int) -> None:
    """Print the seconds of a round on Flower, and MB/s from two sizes of message."""
    spent = {}
    for size in (0, megabytes):
        with tempfile.TemporaryDirectory() as folder:
            found = flower_rounds(Path(folder), rounds, size)[1:]  # the first has the start in it
        spent[size] = statistics.median(found)
        print(
            f"a round without work on Flower, 3 nodes, {size or 'next to no'} MB: "
            f"{spent[size]:.2f} s ({min(found):.2f} to {max(found):.2f}, {len(found)} rounds)"
        )
    more = max(spent[megabytes] - spent[0], 1e-9)
    print(f"{6 * megabytes} MB a round (3 nodes, both ways): {6 * megabytes / more:.0f} MB/s")


def flower_rounds(folder: Path, rounds: int, megabytes: int) -> list[float]:
    """Seconds of every round, as the hub sees them."""
    names = NAMES[:3]
    make_certificates(folder, ["hub", *names])
    options = {"rounds": rounds, "local_epochs": 0}
    federation: dict[str, Any] = {"run": "cost", "method": "fedavg", "nodes": list(names)}
    federation |= {"options": options, "evaluate_every": 1000}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    address, started = [f"tls/127.0.0.1:{free_ports(1)[0]}"], []
    for name in ("hub", *names):
        site: dict[str, Any] = {"name": name, "federation": "federation.yaml"}
        site |= {"authority": "ca.pem", "certificate": f"{name}.pem", "key": f"{name}.key"}
        site |= {"folder": f"run-{name}"}
        if name == "hub":
            site["listen"] = address
        else:
            made = Path(__file__).stem + (":large" if megabytes else ":node")
            site |= {"connect": address, "node": made}
            site["node_options"] = {"megabytes": megabytes} if megabytes else {}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(site))
        verb = "hub" if name == "hub" else "node"
        command = [sys.executable, "-m", "polyfed", verb, "--quiet", str(path)]
        here = Path(__file__).parent
        started.append(subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL))
    for process in started:
        process.wait()
    lines = (folder / "run-hub" / "metrics.jsonl").read_text().splitlines()
    return [record["seconds"] for record in map(json.loads, lines) if "seconds" in record]


# ---- a large message -----------------------------------------------------------------------------


def transfers(sites: list[Path], megabytes: int, repeats: int) -> None:
    """Print the rates of all ways, taken in turn."""
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=answer, args=(sites[1],))
    other.start()
    ports = free_ports(1)
    partner = context.Process(target=echo_gloo, args=(ports[0], megabytes, repeats))
    partner.start()
    rates: dict[str, list[float]] = {"bare Zenoh": [], "channel": [], "with safetensors": []}
    rates["gloo"] = with_gloo(ports[0], megabytes, repeats)
    partner.join()
    site, federation = read_site(sites[0])
    message = Message({f"t{i}": torch.randn(250_000) for i in range(megabytes)})
    payload = message.to_bytes()
    size = len(payload) / 1e6
    with zenoh_link(site, federation.charter()) as link:
        channel = Channel(1, ["M1"])
        link.arise(1)
        wait_for(link, "up")
        time.sleep(1.0)  # until the other side has seen this one, too
        channel.back("M1", 0.0)
        bare(link, payload)
        through(channel, link, pack({"kind": "say"}, payload))
        for _ in range(repeats):
            rates["bare Zenoh"].append(size / bare(link, payload))
            rates["channel"].append(size / through(channel, link, pack({"kind": "say"}, payload)))
            begun = time.perf_counter()
            parcel = pack({"kind": "say"}, message.to_bytes())
            through(channel, link, parcel)
            rates["with safetensors"].append(size / (time.perf_counter() - begun))
        link.send("M1", b"end")
    other.join()
    for name, found in rates.items():
        print(
            f"{megabytes} MB, {name}: {statistics.median(found):.0f} MB/s "
            f"({min(found):.0f} to {max(found):.0f})"
        )
    pairs = zip(rates["channel"], rates["bare Zenoh"], strict=True)
    print(f"channel / bare Zenoh: {statistics.median(a / b for a, b in pairs):.2f}")


def wait_for(link: Any, what: str) -> tuple[Any, ...]:
    """The next event of that kind."""
    while True:
        found, given = link.events.get(timeout=60)
        if found == what:
            return tuple(given)


def bare(link: Any, payload: bytes) -> float:
    """Seconds for bytes and a short answer."""
    begun = time.perf_counter()
    link.send("M1", payload)
    wait_for(link, "hear")
    return time.perf_counter() - begun


def through(channel: Channel, link: Any, parcel: Parcel) -> float:
    """Seconds until a parcel is confirmed."""
    begun = time.perf_counter()
    channel.post("M1", parcel, begun)
    for to, frame in channel.outbox:
        link.send(to, frame)
    channel.outbox.clear()
    while not channel.is_settled():
        channel.take(*wait_for(link, "hear"))
    return time.perf_counter() - begun


def answer(path: Path) -> None:
    """The other side: one byte for bare bytes; for frames, what the channel says."""
    torch.set_num_threads(1)
    site, federation = read_site(path)
    with zenoh_link(site, federation.charter()) as link:
        channel = Channel(1, ["M0"])
        link.arise(1)
        wait_for(link, "up")
        while True:
            sender, raw = wait_for(link, "hear")
            if raw == b"end":
                return
            if raw[:2] != b"pF":
                link.send("M0", b"x")
                continue
            parcel = channel.take(sender, raw)
            if parcel is not None:
                Message.from_bytes(unpack(parcel)[1])
            for to, frame in channel.outbox:
                link.send(to, frame)
            channel.outbox.clear()


def begin_gloo(rank: int, port: int) -> Any:
    """Two processes that know each other."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    return dist


def with_gloo(port: int, megabytes: int, repeats: int) -> list[float]:
    """MB/s of a tensor that is answered with one number."""
    dist = begin_gloo(0, port)
    tensor, short, rates = torch.randn(250_000 * megabytes), torch.zeros(1), []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        dist.send(tensor, 1)
        dist.recv(short, 1)
        rates.append(megabytes / (time.perf_counter() - begun))
    dist.destroy_process_group()
    return rates[1:]


def echo_gloo(port: int, megabytes: int, repeats: int) -> None:
    """The other side of it."""
    torch.set_num_threads(1)
    dist = begin_gloo(1, port)
    tensor = torch.zeros(250_000 * megabytes)
    for _ in range(repeats + 1):
        dist.recv(tensor, 0)
        dist.send(torch.zeros(1), 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
