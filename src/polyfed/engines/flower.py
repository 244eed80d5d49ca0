"""The Flower engine: the relay's conductor as a ServerApp, its clerk as a ClientApp.

    [tool.flwr.app.components]
    serverapp = "polyfed.engines.flower:server_app"
    clientapp = "polyfed.engines.flower:client_app"

The run's configuration says where the hub's file is (`hub`); a SuperNode's says where its site file
is (`site`). In a simulation the run's `sites` names the files of all nodes, with commas between.

An exchange is one Flower message whose only record is one array of bytes: safetensors behind a
small JSON header, as between peers. Flower's own pickling is not used anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from polyfed.engines import flower_resident
from polyfed.errors import ConfigError

if TYPE_CHECKING:
    from polyfed.engines.site import Site

_RECORD, _ARRAY = "polyfed", "exchange"
_LOOK = 0.1  # seconds between two looks for answers

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def conduct(grid: Grid, context: Context) -> None:
    """Conduct a run, from its start or from where the hub's folder stands."""
    from polyfed.engines.agreement import is_finished, open_folder, run_config
    from polyfed.engines.conductor import Conductor
    from polyfed.engines.flower_site import charter_of, read_hub
    from polyfed.engines.local import torch_device

    _die_with_parent()
    site, federation = read_hub(Path(str(context.run_config["hub"])))
    charter = charter_of(federation)
    config = run_config(site, federation, charter)
    if is_finished(site.folder, config):
        return
    made = site.make(federation.seed)
    hub = None if made is None else charter.enter(site.name, made, torch_device(site.device))
    recorder, point = open_folder(site.folder, config)
    try:
        post = FlowerPost(grid, charter.patience)
        Conductor(charter, hub, recorder, point, post, shown=_shown(site)).run()
    finally:
        recorder.close()


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Answer one exchange from what is on the site's disk."""
    _die_with_parent()
    raw = flower_resident.answer(_site_of(context), unwrap(message.content))
    return Message(wrap(raw), reply_to=message)


class FlowerPost:
    """Exchanges as Flower messages.

    Args:
        grid: as Flower hands it to a ServerApp.
        patience: seconds after which a node that has not answered is lost.
    """

    def __init__(self, grid: Grid, patience: float) -> None:
        self._grid, self._patience = grid, patience

    def present(self) -> dict[Hashable, str | None]:
        """The SuperNodes that are online; with the name under which its key was registered."""
        nodes = self._grid.get_nodes()
        return {node.node_id: node.name or None for node in nodes}

    def exchange(self, given: Mapping[Any, bytes]) -> dict[Any, bytes]:
        """Send to all, and wait for the answers; Flower answers for nodes that it loses."""
        waiting: dict[str, Hashable] = {}  # who is asked, by the number of the message
        for address, raw in given.items():
            message = Message(wrap(raw), address, "query", ttl=self._patience)
            waiting |= {each: address for each in self._grid.push_messages([message]) if each}
        found, end = {}, time.monotonic() + self._patience
        while waiting and time.monotonic() < end:
            time.sleep(_LOOK)
            for reply in self._grid.pull_messages(list(waiting)):
                address = waiting.pop(reply.metadata.reply_to_message_id, None)
                if address is not None and reply.has_content():
                    found[address] = unwrap(reply.content)
        return found


def wrap(raw: bytes) -> RecordDict:
    """Bytes as Flower carries them."""
    array = Array(dtype="uint8", shape=(len(raw),), stype="polyfed", data=raw)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unwrap(content: RecordDict) -> bytes:
    """What `wrap` wrapped; nothing, where it did not."""
    record = content.get(_RECORD)
    array = record.get(_ARRAY) if isinstance(record, ArrayRecord) else None
    return array.data if isinstance(array, Array) else b""


def _site_of(context: Context) -> Path:
    if "site" in context.node_config:
        return Path(str(context.node_config["site"]))
    try:
        sites = str(context.run_config["sites"]).split(",")
        return Path(sites[int(context.node_config["partition-id"])])
    except (LookupError, ValueError) as error:
        raise ConfigError(
            "a node does not know its site file: start it with --node-config 'site=\"FILE\"'; in a "
            f'simulation give the run the files of all, sites="A,B" ({error!r}).'
        ) from error


def _shown(site: Site) -> Callable[[str], None]:
    """Write lines where `polyfed hub` looks for them."""
    from polyfed.engines.flower_site import flower_folder

    path = flower_folder(site) / "hub.log"

    def show(text: str) -> None:
        if path.parent.is_dir():
            with path.open("a", encoding="utf-8") as log:
                log.write(f"{text}\n")

    return show


def _die_with_parent() -> None:
    """Do not outlive the process that Flower started this one from: it holds the run folder."""
    if sys.platform == "linux" and Path(sys.argv[0]).name in ("flwr-serverapp", "flwr-clientapp"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
