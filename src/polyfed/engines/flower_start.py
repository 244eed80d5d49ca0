"""Start what Flower needs for a run: a SuperLink at the hub, a SuperNode at every site.

TLS with the same certificates as between peers. A node proves who it is with the key of its
certificate; the hub registers, under its name, the key in NAME.pem, which lies beside its own
certificate. Without certificates, `--insecure` must be typed: then anybody can come as anybody.

Nothing is sent to Flower's makers (telemetry, update checks), and nothing is installed at run time.
What Flower writes lies beside the run folder, in FOLDER-flower.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.node import Name
from polyfed.engines.agreement import NEW_RUN, is_finished, run_config
from polyfed.engines.charter import Charter
from polyfed.engines.flower_resident import VARIABLE, Answers, resident
from polyfed.engines.flower_site import charter_of, flower_folder, read_hub
from polyfed.engines.relay import REFUSED, unbundle
from polyfed.engines.run import Run
from polyfed.engines.site import Federation, Site, read_site
from polyfed.errors import ConfigError, RunError
from polyfed.record.recorder import read_result

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",  # seconds; else 1
}
APP = """
[project]
name = "polyfed-run"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "polyfed"
[tool.flwr.app.components]
serverapp = "polyfed.engines.flower:server_app"
clientapp = "polyfed.engines.flower:client_app"
[tool.flwr.app.config]
hub = ""
sites = ""
"""
_LOG = "flower.log"
_START = 300.0  # seconds for a SuperLink to answer
Shown = Callable[[str], None]


def run_hub(path: str | Path, *, insecure: bool = False, shown: Shown | None = None) -> Run:
    """Be the hub of a run, from its start or from where the hub's folder stands, to its end.

    Args:
        path: the hub's site file, or the federation file.
        insecure: without certificates, for networks that are safe by other means.
        shown: takes a line whenever something is worth saying.
    """
    _need_flower()
    site, federation = read_hub(Path(path))
    if not insecure:
        site.check_security()
    say = shown or (lambda text: None)
    charter = charter_of(federation)
    if _was_finished(site, federation, charter, say):
        return Run.open(site.folder)
    folder = _flower_folder(site)
    host, port = _address(site.listen, "listen", site)
    keys = {} if insecure else {name: _public_key(site, name) for name in charter.nodes}
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    command += ["--isolation", "subprocess", "--disable-runtime-dependency-installation"]
    if insecure:
        command += ["--insecure"]
    else:
        command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(site.authority)]
        command += ["--ssl-certfile", str(site.certificate), "--ssl-keyfile", str(site.key)]
    with _started(command, folder) as superlink:
        _wait_for(port, superlink)
        with _control(port, None if insecure else site.authority) as control:
            for name, key in keys.items():
                _register(control, name, key)
            run = _start_run(control, Path(path).resolve())
            _watch(control, run, superlink, site, say)
    return Run.open(site.folder)


def run_node(path: str | Path, *, insecure: bool = False, shown: Shown | None = None) -> Run:
    """Be a node of a run until it is over.

    Args:
        path: the site file.
        insecure: without certificates, for networks that are safe by other means.
        shown: takes a line whenever something is worth saying.
    """
    _need_flower()
    site, federation = read_site(Path(path))
    if not insecure:
        site.check_security()
    say = shown or (lambda text: None)
    if _was_finished(site, federation, charter_of(federation), say):
        return Run.open(site.folder)
    folder = _flower_folder(site)
    host, port = _address(site.connect, "connect", site)
    command = ["flower-supernode", "--superlink", f"{host}:{port}", "--isolation", "subprocess"]
    command += ["--port", str(_free_port())]
    command += ["--node-config", f'site="{Path(path).resolve()}"']
    if insecure:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(site.authority)]
        command += ["--auth-supernode-private-key", str(_private_key(site, folder))]
    say(f"node {site.name} of run {federation.run}, hub {host}:{port}")
    with resident(_aloud(Answers(Path(path)), say)) as door:
        while not _is_finished(site):
            begun = time.monotonic()
            while not _answers(host, port):
                if time.monotonic() > begun + federation.patience:
                    raise RunError(
                        f"the hub {host}:{port} has not answered for {federation.patience:g} s "
                        "(patience). The same command goes on where this site stands."
                    )
                time.sleep(0.5)
            with _started(command, folder, {VARIABLE: str(door)}) as supernode:
                while supernode.poll() is None and not _is_finished(site):
                    time.sleep(0.2)
                if _is_finished(site):
                    _let_it_answer(host, port, federation.grace)
                else:
                    say("no hub that takes this node yet")
                    time.sleep(1.0)
    return Run.open(site.folder)


def _aloud(answer: Callable[[bytes], bytes], say: Shown) -> Callable[[bytes], bytes]:
    """The same answers; why an exchange is refused is said, once."""
    known: set[str] = set()

    def answered(raw: bytes) -> bytes:
        found = answer(raw)
        header = unbundle(found)[0]
        why = str(header.get("why"))
        if header["kind"] == REFUSED and why not in known:
            known.add(why)
            say(f"refused: {why}")
        return found

    return answered


# ---- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(
    command: Sequence[str], folder: Path, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower's that ends when this one does, however that ends."""
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, **ENVIRONMENT, **(more or {}), "FLWR_HOME": str(folder)}
    environment["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            [shutil.which(command[0], path=environment["PATH"]) or command[0], *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_end_with_parent,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextlib.contextmanager
def _control(port: int, authority: Path | None) -> Iterator[Any]:
    """A line to the SuperLink's Control API, which `flwr` uses too."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        f"127.0.0.1:{port}",
        insecure=authority is None,
        root_certificates=None if authority is None else authority.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    finally:
        client.close()


def _register(control: Any, name: Name, key: bytes) -> None:
    """As `flwr supernode register KEY --name NAME`."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))


def _start_run(control: Any, hub: Path) -> int:
    """As `flwr run`; the number of the run."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content, _ = build_fab_from_files({"pyproject.toml": APP.encode()})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    given = user_config_to_proto({"hub": str(hub)})
    started = control.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=given))
    return int(started.run_id)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end and process.poll() is None:
        if _answers("127.0.0.1", port):
            return
        time.sleep(0.1)
    raise RunError(f"the SuperLink does not answer on port {port}: see flower.log.")


def _watch(
    control: Any, run: int, superlink: subprocess.Popen[bytes], site: Site, shown: Shown
) -> None:
    """Until the hub's folder says that the run is over."""
    from flwr.proto.control_pb2 import ListRunsRequest

    log, read, looked = flower_folder(site) / "hub.log", 0, time.monotonic()
    log.unlink(missing_ok=True)
    while not _is_finished(site):
        time.sleep(0.2)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in lines[read:]:
            shown(line)
        read = len(lines)
        if superlink.poll() is not None:
            raise RunError(f"the SuperLink ended: see {log.with_name(_LOG)}.")
        if time.monotonic() > looked + 2:
            looked = time.monotonic()
            status = control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
            if status.status == "finished" and not _is_finished(site):
                why = status.details or status.sub_status
                raise RunError(f"the hub's run {why}: see {log.with_name(_LOG)}.")


def _let_it_answer(host: str, port: int, grace: float) -> None:
    """The node's last answer leaves; then the hub goes."""
    end = time.monotonic() + max(grace, 10.0)
    while time.monotonic() < end and _answers(host, port):
        time.sleep(0.2)


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


# ---- files ---------------------------------------------------------------------------------------


def _flower_folder(site: Site) -> Path:
    folder = flower_folder(site)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _was_finished(site: Site, federation: Federation, charter: Charter, say: Shown) -> bool:
    """Whether the site's folder holds the result; raises ConfigError if of another run."""
    is_over = is_finished(site.folder, run_config(site, federation, charter))
    if is_over:
        say(f"run {charter.run} is finished already: this is its result. {NEW_RUN}")
    return is_over


def _is_finished(site: Site) -> bool:
    return (site.folder / "config.yaml").exists() and read_result(site.folder) is not None


def _public_key(site: Site, name: Name) -> bytes:
    """The key in the certificate of a node."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    if site.certificate is None:
        raise ConfigError(f"site {site.name}: certificate is not given.")
    path = site.certificate.with_name(f"{name}.pem")
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}. The hub needs the certificate of every node it admits; to go "
            "without, type --insecure."
        ) from error
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(serialization.Encoding.PEM, form)


def _private_key(site: Site, folder: Path) -> Path:
    """The key of the site's certificate, in the form that Flower reads."""
    from cryptography.hazmat.primitives import serialization

    if site.key is None:
        raise ConfigError(f"site {site.name}: key is not given.")
    try:
        key = serialization.load_pem_private_key(site.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{site.key}: {error}.") from error
    path = folder / "node.key"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    )
    return path


def _address(addresses: Sequence[str], what: str, site: Site) -> tuple[str, int]:
    """Host and port of the first address."""
    try:
        host, _, port = addresses[0].partition("/")[2].rpartition(":")
        return host, int(port)
    except (IndexError, ValueError) as error:
        raise ConfigError(
            f"site {site.name}: {what} is {list(addresses)}. Write {what}: [tls/HOST:PORT], the "
            "hub's address."
        ) from error


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _need_flower() -> Any:
    try:
        import flwr
    except ImportError as error:
        raise ConfigError("the Flower engine needs: pip install 'polyfed[flower]'.") from error
    return flwr
