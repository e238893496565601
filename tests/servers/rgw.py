"""S3 for real: a Ceph of one monitor, one store in memory and the RADOS gateway, shared by the processes of a run."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.servers.process import (
    LOOPBACK,
    Folder,
    MissingServer,
    Server,
    ServerFailed,
    find_program,
    free_port,
    listens,
    start,
    tail,
)
from tests.servers.s3 import S3Server
from tests.servers.shared import shared_server

HINT = "apt install --no-install-recommends radosgw ceph-mon ceph-osd"
PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "radosgw-admin")
CONFIG = """\
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{mon2},v1:127.0.0.1:{mon1}
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {folder}/keyring
run_dir = {folder}/run
crash_dir = {folder}/run
admin_socket = {folder}/run/$name.asok
log_file =
log_to_stderr = true
err_to_stderr = true
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
# one copy of everything, few groups, and no waiting for more changes before a map is published
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
mon_data_avail_warn = 1
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
osd_objectstore = memstore
memstore_device_bytes = 8589934592
[mon.a]
mon_data = {folder}/mon
[osd.0]
osd_data = {folder}/osd0
[client]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_thread_pool_size = 64
"""


def available() -> str:
    """Return "" where RGW can run, else why not."""
    try:
        for program in PROGRAMS:
            find_program(program, HINT)
    except MissingServer as error:
        return str(error)
    return ""


@contextmanager
def s3_rgw() -> Iterator[S3Server]:
    """Use the run's RGW (the first user waits for it some seconds), with an empty bucket of one's own."""
    missing = available()
    if missing:
        raise MissingServer(missing)
    with shared_server("rgw", "tests.servers.rgw_holder", lambda state: listens(state["port"])) as state:
        server = S3Server(f"http://{LOOPBACK}:{state['port']}", state["access_key"], state["secret_key"])
        yield server.make_bucket()


@contextmanager
def own_rgw() -> Iterator[dict[str, Any]]:
    """Run an RGW that ends with this context; what the holder does."""
    with ExitStack() as stack:
        # of several daemons any may stumble once, on a port or on a slow machine
        yield start(lambda port: _bring_up(port, stack), again="")


def _bring_up(port: int, stack: ExitStack) -> dict[str, Any]:
    """Start a cluster. Where that fails, take down what has started; else leave that to `stack`."""
    folder = Folder("rgw")
    with ExitStack() as mine:
        mine.callback(folder.remove)
        _Cluster(folder.path, port, mine.callback).up()
        stack.push(mine.pop_all())
    return {"port": port, "access_key": "tdaccesskey", "secret_key": "tdsecretkey", "pid": os.getpid()}


class _Cluster:
    """The steps of `ceph-deploy`, on one machine, without systemd and without a container."""

    def __init__(self, folder: Path, port: int, later: Callable[[Callable[[], None]], Any]) -> None:
        self.folder, self.port, self.later = folder, port, later
        # the system's python runs `ceph`, and must not see the modules of ours
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.env["CEPH_CONF"] = str(folder / "ceph.conf")

    def up(self) -> None:
        folder, fsid, osd = self.folder, str(uuid.uuid4()), str(uuid.uuid4())
        mon2, mon1 = free_port(), free_port()
        for name in ("mon", "osd0", "run", "rgw"):
            (folder / name).mkdir()
        (folder / "ceph.conf").write_text(
            CONFIG.format(folder=folder, fsid=fsid, port=self.port, mon1=mon1, mon2=mon2) + self._classes()
        )
        keyring = f"{folder}/keyring"
        self._do("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        rights = [word for part in ("mon", "osd", "mgr") for word in ("--cap", part, "allow *")]
        self._do("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *rights)
        rights = ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"]
        self._do("ceph-authtool", keyring, "--gen-key", "-n", "osd.0", *rights)
        where = f"[v2:{LOOPBACK}:{mon2},v1:{LOOPBACK}:{mon1}]"
        self._do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", where, f"{folder}/monmap")
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a").wait_until(lambda: listens(mon2))
        self._do("ceph", "osd", "new", osd)
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        osd_server = self._daemon("ceph-osd", "-i", "0")
        # who asks for pools before the monitor knows the store may wait for ever
        osd_server.wait_until(lambda: json.loads(self._do("ceph", "osd", "stat", "-f", "json"))["num_up_osds"] == 1)
        user = ["--uid", "td", "--display-name", "td", "--access-key", "tdaccesskey", "--secret-key", "tdsecretkey"]
        self._do("radosgw-admin", "user", "create", *user)  # makes the pools: most of the time
        self._daemon("radosgw", "-n", "client.admin", "--keyring", keyring).wait_until(lambda: listens(self.port))

    def _classes(self) -> str:
        """Where Debian keeps the server-side code of RGW, on this processor's architecture."""
        found = sorted(Path("/usr").glob("lib*/**/rados-classes"))
        return f"[osd]\nosd_class_dir = {found[0]}\n" if found else ""

    def _do(self, *command: str) -> str:
        try:
            done = subprocess.run(
                [find_program(command[0], HINT), *command[1:]],
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=100,
                check=False,
            )
            if not done.returncode:
                return done.stdout
            failed = f"ended with {done.returncode}\n{done.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            failed = "did not end within 100 s"
        logs = [tail(log) for log in sorted(self.folder.glob("*.log"))]
        raise ServerFailed("\n".join([f"{' '.join(command)} {failed}", *logs]))

    def _daemon(self, program: str, *options: str) -> Server:
        # -f: in the foreground, logging to stderr
        command = [find_program(program, HINT), "-f", *options]
        server = Server(command, self.folder / f"{program}.log", env=self.env)
        # nothing in it is worth an orderly end
        self.later(server.kill)
        return server
