"""The peer engine: a party on a real network, Eclipse Zenoh, with no server.

Every peer listens, and knows addresses of a few others; through them it finds all. Links are TLS
with certificates on both sides. What is for X from Y has the key polyfed/RUN/to/X/Y, and a peer
takes it only over the link whose certificate says Y: nobody can speak for another. A token,
polyfed/RUN/alive/Y/LIFE, tells the others that Y is there, and its end that it is not.

The party itself (`party.py`) runs in one thread, one event after the other; its work runs in
another, so that it answers while it trains.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polyfed import topologies
from polyfed.core.node import Name
from polyfed.engines.charter import Charter
from polyfed.engines.local import Settings, torch_device
from polyfed.engines.party import Party
from polyfed.engines.run import Run, plain
from polyfed.engines.site import Federation, Site, read_site
from polyfed.engines.store import FolderStore
from polyfed.errors import ConfigError
from polyfed.methods._guard import own_root
from polyfed.record import Recorder
from polyfed.record.recorder import read_result
from polyfed.train.together import Trainer

_SAID = ("put", "liveliness_token")
_ASKED = ("declare_subscriber", "declare_liveliness_subscriber", "liveliness_query")
_OUT = (*_SAID, *_ASKED, "reply")
_LAST_WORDS = 0.2  # seconds for what was sent last to leave
Shown = Callable[[str], None]
Happened = tuple[str, tuple[Any, ...]]


def run_peer(path: str | Path, *, insecure: bool = False, shown: Shown | None = None) -> Run:
    """Take part in a run, from its start or from where this site stands, to its end.

    Args:
        path: the site file.
        insecure: without certificates, for networks that are safe by other means.
        shown: takes a line whenever something is worth saying.
    """
    site, federation = read_site(Path(path))
    if not insecure:
        site.check_security()
    if (site.folder / "config.yaml").exists() and read_result(site.folder) is not None:
        return Run.open(site.folder)
    charter = federation.charter()
    made = site.make(federation.seed)
    node = charter.enter(site.name, made, torch_device(site.device))
    if node is not None and charter.method.guard:
        own_root(node)
    recorder = _recorder(site, federation, charter)
    try:
        party = Party(charter, site.name, node, FolderStore(recorder), recorder)
        with zenoh_link(site, charter, insecure=insecure) as link:
            drive(party, link, shown)
    finally:
        recorder.close()
    return Run.open(site.folder)


def _recorder(site: Site, federation: Federation, charter: Charter) -> Recorder:
    if (site.folder / "config.yaml").exists():
        return Recorder.reopen(site.folder)[0]
    settings = Settings(seed=charter.seed, device=site.device, stack="never")
    config = {
        "method": charter.method.name,
        "options": plain(charter.method),
        "task": None if site.node is None or ":" in site.node else site.node,
        "task_options": site.node_options,
        "topology": topologies.label(charter.topology),
        "settings": {**plain(settings), "evaluate_every": charter.evaluate_every},
        "party": site.name,
        "federation": plain(federation),
    }
    return Recorder.create(site.folder, config)


class Events:
    """What happens on a link, in order; who brings frames waits while too many bytes lie here.

    Args:
        most: bytes that may lie here.
    """

    def __init__(self, most: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Happened, int]] = queue.SimpleQueue()
        self._most, self._held, self._is_closed = most, 0, False
        self._room = threading.Condition()

    def put(self, event: Happened, size: int = 0) -> None:
        """Add an event; one of some size waits until there is room."""
        with self._room:
            if size:
                self._room.wait_for(lambda: self._is_closed or self._held < self._most)
            self._held += size
        self._queue.put((event, size))

    def get(self, timeout: float | None = None) -> Happened:
        """The next event; raises queue.Empty if there is none in time."""
        event, size = self._queue.get(timeout=timeout)
        with self._room:
            self._held -= size
            self._room.notify_all()
        return event

    def empty(self) -> bool:
        """Whether nothing has happened."""
        return self._queue.empty()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()


class Link:
    """What a driver needs of a network: a queue of what happens, and a way to send."""

    def __init__(
        self,
        send: Callable[[Name, bytes], None],
        arise: Callable[[int], None],
        most: int = 1 << 32,
    ) -> None:
        self.events = Events(most)
        self.send, self.arise = send, arise


def drive(party: Party, link: Link, shown: Shown | None = None) -> None:
    """Let a party live on a link until it is over."""
    say = shown or (lambda text: None)
    trainer = Trainer("never")
    begun = None
    with ThreadPoolExecutor(1) as worker:

        def work(jobs: Any) -> None:
            try:
                link.events.put(("worked", (jobs.do(trainer),)))
            except BaseException as error:  # noqa: BLE001 - it is raised again where it is heard
                link.events.put(("failed", (error,)))

        party.begin(time.monotonic())
        link.arise(party.born)
        standing = ""
        while True:
            for to, frame in party.outbox:
                link.send(to, frame)
            party.outbox.clear()
            now_standing = _standing(party)
            if now_standing != standing:
                standing = now_standing
                say(standing)
            if party.is_over:
                time.sleep(_LAST_WORDS)
                return
            if party.work is not None and party.work is not begun:
                begun = party.work
                worker.submit(work, begun)
            now = time.monotonic()
            try:
                what, given = link.events.get(timeout=min(max(party.due(now) - now, 0.001), 3600))
            except queue.Empty:
                what, given = "tick", ()
            if what == "failed":
                raise given[0]
            if what in ("up", "down"):
                say(f"{given[0]} is {'here' if what == 'up' else 'gone'}")
            getattr(party, what)(*given, time.monotonic())


def _standing(party: Party) -> str:
    held = party.council.accepted
    if held is None:
        return "waiting for all parties"
    last = party.charter.method.rounds
    who = ", ".join(held.members)
    return f"round {held.round} of {last} with {who}" if held.round <= last else "the end"


@contextlib.contextmanager
def zenoh_link(site: Site, charter: Charter, *, insecure: bool = False) -> Iterator[Link]:
    """A link to the other parties."""
    try:
        import zenoh
    except ImportError as error:
        raise ConfigError("the peer engine needs: pip install 'polyfed[peer]'.") from error

    root, me = f"polyfed/{charter.run}", site.name
    others = [name for name in charter.parties if name != me]
    try:
        session = zenoh.open(_config(zenoh.Config(), site, root, others, insecure=insecure))
    except zenoh.ZError as error:
        raise ConfigError(f"site {me} could not open its network: {error}") from error
    with session:
        publishers = {
            to: session.declare_publisher(
                f"{root}/to/{to}/{me}",
                congestion_control=zenoh.CongestionControl.BLOCK,
                reliability=zenoh.Reliability.RELIABLE,
                express=True,
            )
            for to in others
        }
        lives: dict[Name, set[str]] = defaultdict(set)
        kept: list[Any] = []

        def arise(born: int) -> None:
            kept.append(session.liveliness().declare_token(f"{root}/alive/{me}/{born}"))

        link = Link(lambda to, frame: publishers[to].put(frame), arise, 2 * charter.largest)

        def heard(sample: Any) -> None:
            sender = str(sample.key_expr).rpartition("/")[2]
            raw = sample.payload.to_bytes()
            link.events.put(("hear", (sender, raw)), len(raw))

        def noticed(sample: Any) -> None:
            *_, name, life = str(sample.key_expr).split("/")
            if name == me:
                return
            if sample.kind == zenoh.SampleKind.PUT:
                lives[name].add(life)
                link.events.put(("up", (name,)))
            else:
                lives[name].discard(life)
                if not lives[name]:
                    link.events.put(("down", (name,)))

        kept.append(session.declare_subscriber(f"{root}/to/{me}/*", heard))
        kept.append(
            session.liveliness().declare_subscriber(f"{root}/alive/**", noticed, history=True)
        )
        try:
            yield link
        finally:
            link.events.close()


def _config(config: Any, site: Site, root: str, others: Sequence[Name], *, insecure: bool) -> Any:
    """Explicit addresses, no multicast; unless insecure, TLS both ways and names from it."""

    def put(key: str, value: Any) -> None:
        config.insert_json5(key, json.dumps(value))

    put("mode", "peer")
    put("listen/endpoints", list(site.listen))
    put("connect/endpoints", list(site.connect))
    put("scouting/multicast/enabled", False)
    put("transport/shared_memory/enabled", False)  # peers on one machine talk over TLS, too
    if insecure:
        return config
    own = {"private_key": str(site.key), "certificate": str(site.certificate)}
    put(
        "transport/link/tls",
        {
            "root_ca_certificate": str(site.authority),
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
            **{
                f"{way}_{what}": path for way in ("listen", "connect") for what, path in own.items()
            },
        },
    )
    put("access_control", _admission(root, others))
    return config


def _admission(root: str, others: Sequence[Name]) -> dict[str, Any]:
    """Who may say what: every party under its own name, and nobody else anything."""

    def rule(name: str, flow: str, messages: Sequence[str], *keys: str) -> dict[str, Any]:
        return {
            "id": name,
            "permission": "allow",
            "flows": [flow],
            "messages": list(messages),
            "key_exprs": list(keys),
        }

    rules, subjects, policies = [rule("out", "egress", _OUT, f"{root}/**")], [], []
    for name in others:
        said = rule(
            f"said-{name}", "ingress", _SAID, f"{root}/to/*/{name}", f"{root}/alive/{name}/*"
        )
        asked = rule(f"asked-{name}", "ingress", _ASKED, f"{root}/to/{name}/*", f"{root}/alive/**")
        rules += [said, asked]
        subjects.append({"id": name, "cert_common_names": [name]})
        policies.append({"rules": ["out", said["id"], asked["id"]], "subjects": [name]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }
