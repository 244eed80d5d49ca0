"""The peer engine: a party on a real network, Eclipse Zenoh, with no server.

Every peer listens, and knows addresses of a few others; through them it finds all. Links are TLS
with certificates on both sides. What is for X from Y has the key polyfed/RUN/to/X/LIFE/Y/LIFE, and
a peer takes it only over the link whose certificate says Y: nobody can speak for another. A token,
polyfed/RUN/alive/Y/LIFE, tells the others that Y is there, and its end that it is not. A token
polyfed/RUN/taken/Y/LIFE/X tells a second process with Y's name that X hears the first (`lives.py`).

The party itself (`party.py`) runs in one thread, one event after the other; its work runs in
another, so that it answers while it trains.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from polyfed.core.node import Name
from polyfed.engines import words
from polyfed.engines.agreement import NEW_RUN, is_finished, open_folder, run_config
from polyfed.engines.charter import Charter
from polyfed.engines.lives import Lives
from polyfed.engines.local import torch_device
from polyfed.engines.party import Party
from polyfed.engines.run import Run
from polyfed.engines.site import Site, read_site
from polyfed.engines.store import FolderStore
from polyfed.errors import ConfigError
from polyfed.methods._guard import own_root
from polyfed.train.together import Trainer

_SAID = ("put", "liveliness_token")
_ASKED = ("declare_subscriber", "declare_liveliness_subscriber", "liveliness_query")
_OUT = (*_SAID, *_ASKED, "reply")
_LEASE = 15.0  # seconds; who died without a word is gone by then (Zenoh gives it 10)
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
    say = shown or (lambda text: None)
    charter = federation.charter()
    config = run_config(site, federation, charter)
    if is_finished(site.folder, config):
        say(f"run {charter.run} is finished already: this is its result. {NEW_RUN}")
        return Run.open(site.folder)
    made = site.make(federation.seed)
    node = charter.enter(site.name, made, torch_device(site.device))
    if node is not None and charter.method.guard:
        own_root(node)
    recorder, _ = open_folder(site.folder, config)
    life = time.time_ns() // 1000
    try:
        party = Party(charter, site.name, node, FolderStore(recorder), recorder, since=life)
        with zenoh_link(site, charter, insecure=insecure) as link:
            drive(party, link, say)
    finally:
        recorder.close()
    return Run.open(site.folder)


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


def drive(party: Party, link: Link, say: Shown) -> None:
    """Let a party live on a link until it is over; raises PolyfedError if not at the end."""
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
            if party.is_over:
                time.sleep(_LAST_WORDS)
                break
            if words.standing(party) != standing:
                standing = words.standing(party)
                say(standing)
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
            if what == "say":
                say(*given)
                continue
            if what in ("up", "down"):
                say(f"{given[0]} is {'here' if what == 'up' else 'gone'}")
            getattr(party, what)(*given, time.monotonic())
    failure = words.failure(party)
    if failure is not None:
        raise failure


@contextlib.contextmanager
def zenoh_link(site: Site, charter: Charter, *, insecure: bool = False) -> Iterator[Link]:
    """A link to the other parties."""
    try:
        import zenoh
    except ImportError as error:
        raise ConfigError("the peer engine needs: pip install 'polyfed[peer]'.") from error

    root = f"polyfed/{charter.run}"
    others = [name for name in charter.parties if name != site.name]
    try:
        session = zenoh.open(_config(zenoh.Config(), site, root, others, insecure=insecure))
    except zenoh.ZError as error:
        raise ConfigError(f"site {site.name} could not open its network: {error}") from error
    with session:
        link = ZenohLink(session, root, site.name, 2 * charter.largest)
        try:
            yield link
        finally:
            link.close()


class ZenohLink(Link):
    """A link on a Zenoh session.

    Args:
        session: an open one.
        root: how all keys of the run begin.
        me: the party.
        most: bytes that may lie here unread.
    """

    def __init__(self, session: Any, root: str, me: Name, most: int) -> None:
        super().__init__(self._send, self._arise, most)
        self._session, self._root, self._me, self._born = session, root, me, 0
        self._lives = Lives()
        self._kept: list[Any] = []
        self._publishers: dict[Name, tuple[int, Any]] = {}
        self._refusals: dict[tuple[Name, int], Any] = {}
        self._rivalry: dict[Name, threading.Timer] = {}  # who hears another in this one's place

    def close(self) -> None:
        """Let nobody wait any more."""
        self.events.close()
        for timer in self._rivalry.values():
            timer.cancel()

    def _arise(self, born: int) -> None:
        root, me, live = self._root, f"{self._me}/{born}", self._session.liveliness()
        self._born = born
        self._kept = [
            self._session.declare_subscriber(f"{root}/to/{me}/*/*", self._heard),
            live.declare_subscriber(f"{root}/alive/*/*", self._noticed, history=True),
            live.declare_subscriber(f"{root}/taken/{me}/*", self._rivalled, history=True),
            live.declare_token(f"{root}/alive/{me}"),
        ]

    def _send(self, to: Name, frame: bytes) -> None:
        import zenoh

        life = self._lives.heard.get(to)
        if life is None:
            return  # it is sent again when there is somebody
        known = self._publishers.get(to)
        if known is None or known[0] != life:
            publisher = self._session.declare_publisher(
                f"{self._root}/to/{to}/{life}/{self._me}/{self._born}",
                congestion_control=zenoh.CongestionControl.BLOCK,
                reliability=zenoh.Reliability.RELIABLE,
                express=True,
            )
            known = self._publishers[to] = (life, publisher)
        known[1].put(frame)

    def _heard(self, sample: Any) -> None:
        *_, sender, life = str(sample.key_expr).split("/")
        if self._lives.heard.get(sender) == int(life):
            raw = sample.payload.to_bytes()
            self.events.put(("hear", (sender, raw)), len(raw))

    def _noticed(self, sample: Any) -> None:
        *_, name, life = str(sample.key_expr).split("/")
        if name == self._me:
            return
        is_there = _is_there(sample)
        changes = (self._lives.came if is_there else self._lives.went)(name, int(life))
        for what, which in changes:
            if what == "refused":
                key = f"{self._root}/taken/{name}/{which}/{self._me}"
                self._refusals[name, which] = self._session.liveliness().declare_token(key)
                self.events.put(("say", (f"a second {name} is there, and is not heard",)))
            elif what == "excused":
                token = self._refusals.pop((name, which), None)
                if token is not None:
                    token.undeclare()
            else:
                self.events.put((what, (name,)))

    def _rivalled(self, sample: Any) -> None:
        """Another party hears a process that came in this one's name before."""
        by = str(sample.key_expr).rpartition("/")[2]
        if by in self._rivalry:
            self._rivalry.pop(by).cancel()
        if _is_there(sample):
            text = f"{by} hears another process as {self._me}: waiting {_LEASE:g} s for its end"
            self.events.put(("say", (text,)))
            error = ConfigError(
                f"another process takes part as {self._me}, and {by} hears that one. It goes on "
                "undisturbed; this one has taken no part and ends. Has the site been started "
                "twice, or does `name` in this site file belong to another site?"
            )
            timer = threading.Timer(_LEASE, self.events.put, [("failed", (error,))])
            timer.daemon = True
            self._rivalry[by] = timer
            timer.start()


def _is_there(sample: Any) -> bool:
    import zenoh

    return bool(sample.kind == zenoh.SampleKind.PUT)


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
        said_keys = (f"to/*/*/{name}/*", f"alive/{name}/*", f"taken/*/*/{name}")
        asked_keys = (f"to/{name}/**", "alive/**", f"taken/{name}/**")
        said = rule(f"said-{name}", "ingress", _SAID, *(f"{root}/{key}" for key in said_keys))
        asked = rule(f"asked-{name}", "ingress", _ASKED, *(f"{root}/{key}" for key in asked_keys))
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
