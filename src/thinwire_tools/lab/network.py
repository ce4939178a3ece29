"""A network of slow links on one machine: one network namespace per node, all joined at a hub. A node has one rank,
or several, which then share its link and reach each other by its own loopback device, at any speed.

Every node has an interface ``eth0`` with an address of its own; its other end is in the hub's namespace, on a bridge
(or, with a latency, losses or NAT, on the relay of `thinwire_tools.lab.relay`). A token bucket (``tc tbf``) at each end
limits each direction: what a node sends, and what it receives. The machine's own network is never touched.

The namespaces have no names. One small process keeps them (`thinwire_tools.lab.keeper`), and when it ends, because the
network was closed or because this process died in any way, everything ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from thinwire_tools.lab import keeper, relay, tools
from thinwire_tools.lab.namespaces import NodeNamespaces, children_in
from thinwire_tools.lab.units import format_rate, parse_rates, parse_share, parse_time

INTERFACE = "eth0"
NETWORK = "10.77.0.0/24"
MASTER_PORT = 29500
CONGESTION_AVAILABLE = "/proc/sys/net/ipv4/tcp_available_congestion_control"
CONGESTION_DEFAULT = "/proc/sys/net/ipv4/tcp_congestion_control"
MTU = 1500
MAX_RANKS = 250
# Unshaped links keep their token bucket, at a rate that nothing here reaches, for its byte counter.
UNSHAPED_BPS = 10**12
UNSHAPED_BURST_BYTES = 2**20
UNSHAPED_QUEUE_BYTES = 2**26
MAX_BURST_BYTES = 2**28
MAX_QUEUE_BYTES = 2**32 - 1
RELAY_MEMORY_BYTES = 2**28
CLOSE_TIMEOUT_S = 20.0


def default_burst_bytes(rate_bps: int) -> int:
    """Return the burst of a token bucket at ``rate_bps``: the bytes that may leave at once after a pause.

    1.5 ms at the rate, so that most of the frames the kernel makes (about 1 ms of data each) pass whole: cut into
    packets they cost several times the processor time. From 0.4 Gbit/s on, one largest frame of 64 KiB is enough. From
    5.6 Gbit/s on it is 0.1 ms: with 64 KiB, two cores carried half of 10 Gbit/s, with 128 KiB 0.86 of it.
    """
    burst = max(4096, min(rate_bps * 15 // 80_000, max(70_000, rate_bps // 80_000)))
    return min(burst, MAX_BURST_BYTES)


def default_queue_bytes(rate_bps: int, burst_bytes: int) -> int:
    """Return the limit of the queue before a token bucket: 50 ms at the rate, at least 128 KiB and some bursts, and no
    more than the kernel can count."""
    return min(MAX_QUEUE_BYTES, max(128 * 1024, 4 * burst_bytes, round(rate_bps / 8 * 0.05)))


def address(node: int) -> str:
    """Return the IPv4 address of ``node`` inside the lab."""
    return f"10.77.0.{node + 1}"


def ethernet_address(node: int) -> str:
    """Return the Ethernet address (locally administered) of ``node``'s interface."""
    return f"02:77:00:00:00:{node:02x}"


class Network:
    """Links between ``num_ranks`` ranks; a context manager.

    Args:
        num_ranks: how many ranks.
        ranks_per_node: how many of them, in order, share a node: its network namespace and its link.
        rate: ``"100mbit"`` for all, ``"1gbit,100mbit"`` or a list for each node; None leaves the links unshaped.
        rtt: round-trip time added between any two nodes, as ``"20ms"``.
        loss: share of the packets from one node to another that are lost, each way, as ``"1%"``.
        nat: ranks whose nodes others cannot connect to by TCP, as behind a home router; they can connect to others.
        burst_bytes: burst of the token buckets; None for `default_burst_bytes`.

    Raises:
        LabUnavailableError: a network cannot be made here; says what is missing.
        ValueError: a rate or a time is not one, ranks do not fill the nodes, the relay cannot carry the rate.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        ranks_per_node: int = 1,
        rate: str | Sequence[str] | None = None,
        rtt: str | None = None,
        loss: str | None = None,
        nat: Sequence[int] = (),
        burst_bytes: int | None = None,
    ) -> None:
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks is {num_ranks}: a lab has 1 to {MAX_RANKS} ranks")
        if ranks_per_node < 1 or num_ranks % ranks_per_node:
            raise ValueError(f"{num_ranks} ranks do not fill nodes of {ranks_per_node}")
        if burst_bytes is not None and not 1 <= burst_bytes <= MAX_BURST_BYTES:
            raise ValueError(f"burst_bytes must be between 1 and {MAX_BURST_BYTES}, not {burst_bytes}")
        self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
        self.num_nodes = num_ranks // ranks_per_node
        self._rtt_s = parse_time(rtt) if rtt is not None else 0.0
        self._loss = parse_share(loss) if loss is not None else 0.0
        self._nat = sorted({self._node(rank) for rank in nat})
        if self._loss and rate is None:
            raise ValueError("a loss needs a rate: the relay that loses packets does not carry an unshaped link")
        self._burst_bytes = burst_bytes
        self._rates = self._checked(rate)
        self._processes: list[subprocess.Popen[Any]] = []
        self._relay: subprocess.Popen[str] | None = None
        self._held: list[int] = []
        self._pids: int | None = None
        # Linux's own default, so that figures of machines with another one compare: with both directions full, bbr
        # carries 0.88 of a rate, cubic 0.93. None is what new namespaces have.
        self._congestion = "cubic" if "cubic" in Path(CONGESTION_AVAILABLE).read_text().split() else None
        for tool in tools.PACKAGES:
            tools.find(tool)
        self._keeper = tools.start(
            [keeper.__file__, str(os.getpid()), str(self.num_nodes)], inside=(), what="the keeper"
        )
        try:
            self._made = tools.answer(self._keeper, "the keeper")
            if "refused" in self._made:
                raise tools.refused(self._made["refused"])
            # Without descriptors here they could not be emptied if the keeper and its guard are killed at once.
            for namespace in (*self._made["nodes"], self._made["hub"]):
                self._held.append(os.open(f"/proc/{self._keeper.pid}/fd/{namespace}", os.O_RDONLY))
            if "first_process" in self._made:
                self._pids = os.open(f"/proc/{self._made['first_process']}/ns/pid", os.O_RDONLY)
            self._join()
            self._set_buckets()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def popen(self, rank: int, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on ``rank``'s node; arguments as `subprocess.Popen`, ``env`` completed.

        It gets a session of its own unless ``popen_kwargs`` say otherwise, so that a Ctrl-C in the terminal reaches
        this process alone, which then decides. It is killed when the network closes or this process ends. As root it is
        in a PID namespace of the network, so that the ids of processes that it sees are not those outside.

        Raises:
            FileNotFoundError: there is no such command.
        """
        environment = self._environment(rank, popen_kwargs.pop("env", None))
        if os.sep not in argv[0] and shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"there is no command {argv[0]!r} on the PATH")
        popen_kwargs.setdefault("start_new_session", True)
        command = [*self._inside_node(self._node(rank)), *argv]
        if self._pids is None:
            process = subprocess.Popen(command, env=environment, **popen_kwargs)
        else:
            command[-len(argv) : -len(argv)] = [tools.find("unshare"), "--mount-proc", "--"]
            with children_in(self._pids):
                process = subprocess.Popen(command, env=environment, **popen_kwargs)
        self._processes = [started for started in self._processes if started.poll() is None] + [process]
        return process

    def namespaces(self, rank: int) -> NodeNamespaces:
        """Return the namespaces of ``rank``'s node, and its environment, for a process that runs already.

        A process that has entered them is killed when the network closes or this process ends.
        """
        return NodeNamespaces(tuple(self._namespaces(self._made["nodes"][self._node(rank)])), self._environment(rank))

    def _environment(self, rank: int, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return ``given``, or the present environment, with the variables that ``torchrun`` sets on a machine for each
        node.

        ``OMP_NUM_THREADS`` is 1 unless it is set. NCCL is told that nodes are different machines, so that it
        uses their links and not the memory they share.
        """
        size, node = str(self.num_ranks), self._node(rank)
        base = dict(os.environ if given is None else given)
        return base | {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "NCCL_IB_DISABLE": "1",
            "NCCL_HOSTID": f"thinwire-lab-{os.getpid()}-{node}",
            "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", "1"),
        }

    def shape(self, rate: str | Sequence[str] | None) -> None:
        """Limit the links to ``rate`` (as in the constructor; None: not at all) from now on; processes may be running.

        Raises:
            ValueError: ``rate`` is not a rate, or the relay cannot carry it.
        """
        self._rates = self._checked(rate)
        self._set_buckets()

    def set_link(self, rank: int, *, up: bool) -> None:
        """Take the link of ``rank``'s node down, as if its cable were pulled, or up again; processes may be running."""
        line = f"link set {_port(self._node(rank))} {'up' if up else 'down'}"
        tools.call(self._inside_hub(), "ip", ["-batch", "-"], lines=[line])

    def interface_bytes(self, rank: int) -> tuple[int, int]:
        """Return the bytes (sent, received) of ``rank``'s node since the start, with Ethernet, IP and TCP headers.

        Counted where each link's rate is limited, in frames of at most the MTU: a large frame that the kernel hands
        on whole counts with the headers of all the packets a network card would make of it.
        """
        node = self._node(rank)
        sent = _counted_bytes(self._inside_node(node), INTERFACE)
        return sent, _counted_bytes(self._inside_hub(), _port(node))

    @property
    def keeper_pid(self) -> int:
        """Process that keeps the namespaces: when it ends, so do the network and every process in it."""
        return self._keeper.pid

    def describe(self) -> dict[str, Any]:
        """Describe the links: rate (None if unshaped), burst and queue limit of each node, latency, TCP and mode.

        With a latency, losses or NAT, ``relay`` has the relay's counters (`thinwire_tools.lab.relay.Counters`).
        """
        buckets = [self._bucket(node) for node in range(self.num_nodes)] if self._rates is not None else None
        return {
            "num_ranks": self.num_ranks,
            "ranks_per_node": self.ranks_per_node,
            "rate_bps": list(self._rates) if self._rates is not None else None,
            "burst_bytes": [burst for _, burst, _ in buckets] if buckets is not None else None,
            "queue_bytes": [queue for _, _, queue in buckets] if buckets is not None else None,
            "rtt_s": self._rtt_s,
            "loss": self._loss,
            "nat": self._nat,
            "congestion_control": self._congestion or self._inherited_congestion(),
            "mtu": MTU,
            "mode": self._made["mode"],
            "relay": self._relay_counters(),
        }

    def close(self) -> None:
        """Kill all processes in the namespaces and remove them. Closing a closed network does nothing."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(CLOSE_TIMEOUT_S)
        finally:
            # The keeper may have been killed: then the processes it would have ended are still there.
            for process in [self._keeper, *([self._relay] if self._relay else []), *self._processes]:
                if process.poll() is None:
                    process.kill()
                process.wait()
            held, self._held = self._held, []
            if held and self._keeper.returncode != 0:
                keeper.empty(held)
            for namespace in held:
                os.close(namespace)
            if self._pids is not None:
                os.close(self._pids)
                self._pids = None
            for process in (self._keeper, self._relay):
                for pipe in (process.stdin, process.stdout) if process is not None else ():
                    if pipe is not None:
                        pipe.close()

    def _node(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of a network with ranks 0 to {self.num_ranks - 1}")
        return rank // self.ranks_per_node

    @property
    def _relays(self) -> bool:
        """Whether the relay joins the links, in place of a bridge."""
        return self._rtt_s > 0 or self._loss > 0 or bool(self._nat)

    def _checked(self, rate: str | Sequence[str] | None) -> tuple[int, ...] | None:
        if rate is None:
            return None
        rates = parse_rates(rate, self.num_nodes)
        ceiling = relay.LOSSY_CEILING_BPS if self._loss else relay.CEILING_BPS
        if self._relays and sum(rates) > ceiling:
            effect = "loses packets" if self._loss else "adds the latency" if self._rtt_s else "refuses connections"
            raise ValueError(
                f"the links sum up to {format_rate(sum(rates))}, and the relay that {effect} carries "
                f"{format_rate(ceiling)} at most: lower the rate, take fewer nodes, or leave that out"
            )
        return rates

    def _namespaces(self, namespace: int) -> list[tuple[str, int]]:
        """Return paths and kinds of the namespaces to enter; ``namespace`` is the keeper's file descriptor."""
        if self._keeper.poll() is not None:
            raise RuntimeError("this network is closed: its namespaces are gone; make a new one")
        process = f"/proc/{self._keeper.pid}"
        user = [(f"{process}/ns/user", keeper.CLONE_NEWUSER)] if self._made["mode"] != "root" else []
        return [*user, (f"{process}/fd/{namespace}", keeper.CLONE_NEWNET)]

    def _inside(self, namespace: int) -> list[str]:
        """Return the command prefix that runs a command inside a namespace."""
        *user, (net, _) = self._namespaces(namespace)
        options = [option for path, _ in user for option in (f"--user={path}", "--preserve-credentials")]
        return [tools.find("nsenter"), *options, f"--net={net}", "--"]

    def _inside_node(self, node: int) -> list[str]:
        return self._inside(self._made["nodes"][node])

    def _inside_hub(self) -> list[str]:
        return self._inside(self._made["hub"])

    def _join(self) -> None:
        """Make the interfaces and join them in the hub, by a bridge or by the relay."""
        # Without IPv6 addresses and multicast groups the kernel itself sends nothing that would be counted.
        quiet = "addrgenmode none" if Path("/proc/net/if_inet6").exists() else ""
        joined = "arp off" if self._relays else "master bridge"
        hub = []
        if not self._relays:
            bridge = "link add bridge type bridge stp_state 0 mcast_snooping 0"
            hub += [bridge, f"link set bridge mtu {MTU} {quiet}", "link set bridge up"]
        for node in range(self.num_nodes):
            port, inside = _port(node), f"/proc/{self._keeper.pid}/fd/{self._made['nodes'][node]}"
            hub += [
                f"link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {inside}",
                f"link set {port} {joined} {quiet}",
                f"link set {port} up",
            ]
        tools.call(self._inside_hub(), "ip", ["-batch", "-"], lines=hub)
        for node in range(self.num_nodes):
            lines = [
                "link set lo up",
                f"link set {INTERFACE} address {ethernet_address(node)} {quiet}",
                f"link set {INTERFACE} up",
                f"address add {address(node)}/24 dev {INTERFACE}",
            ]
            if self._congestion is not None:
                # A route sets it: the namespace's setting takes only what the machine allows to all users.
                route = f"{NETWORK} dev {INTERFACE} proto kernel scope link src {address(node)}"
                lines.append(f"route replace {route} congctl {self._congestion}")
            if self._loss:
                lines.append(f"link set {INTERFACE} gso_max_segs 1")
            tools.call(self._inside_node(node), "ip", ["-batch", "-"], lines=lines)
        if self._relays:
            ports = [f"{_port(node)}={ethernet_address(node).replace(':', '')}" for node in range(self.num_nodes)]
            nat = ",".join(_port(node) for node in self._nat)
            self._relay = tools.start(
                [relay.__file__, repr(self._rtt_s / 2), repr(self._loss), str(RELAY_MEMORY_BYTES), nat, *ports],
                inside=self._inside_hub(),
                what="the relay",
            )
            tools.answer(self._relay, "the relay")

    def _bucket(self, node: int) -> tuple[int, int, int]:
        """Return the rate (bits/s), burst and queue limit (bytes) of ``node``'s token buckets."""
        if self._rates is None:
            return UNSHAPED_BPS, UNSHAPED_BURST_BYTES, UNSHAPED_QUEUE_BYTES
        rate = self._rates[node]
        burst = self._burst_bytes or default_burst_bytes(rate)
        return rate, burst, default_queue_bytes(rate, burst)

    def _set_buckets(self) -> None:
        hub = []
        for node in range(self.num_nodes):
            rate, burst, queue = self._bucket(node)
            # With the same handle `replace` changes a bucket in place: its contents and counters stay.
            bucket = f"root handle 1: tbf rate {rate} burst {burst} limit {queue}"
            hub.append(f"qdisc replace dev {_port(node)} {bucket}")
            line = f"qdisc replace dev {INTERFACE} {bucket}"
            tools.call(self._inside_node(node), "tc", ["-batch", "-"], lines=[line])
        tools.call(self._inside_hub(), "tc", ["-batch", "-"], lines=hub)

    def _inherited_congestion(self) -> str:
        """Return the congestion control of new namespaces, read inside one: it may differ from the machine's."""
        return tools.call(self._inside_node(0), "cat", [CONGESTION_DEFAULT]).strip()

    def _relay_counters(self) -> dict[str, int] | None:
        if self._relay is None:
            return None
        assert self._relay.stdin is not None
        if self._relay.poll() is not None:
            raise RuntimeError(f"the relay of this network ended, with exit status {self._relay.returncode}")
        self._relay.stdin.write("counters\n")
        self._relay.stdin.flush()
        return tools.answer(self._relay, "the relay")


def need_network() -> None:
    """Raise ``LabUnavailableError`` where no network can be made. Call it before anything that takes long."""
    if (missing := unavailable()) is not None:
        raise tools.LabUnavailableError(missing)


def unavailable() -> str | None:
    """Return None if a `Network` can be made here, otherwise what is missing and how to get it. Takes 0.1 s."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux: its links are network namespaces"
    try:
        Network(1, rate="100mbit").close()
    except tools.LabUnavailableError as error:
        return str(error)
    return None


def _port(node: int) -> str:
    """Return the name of the hub's end of ``node``'s link."""
    return f"node{node}"


def _counted_bytes(inside: Sequence[str], interface: str) -> int:
    """Return the bytes that have left through the token bucket of ``interface``."""
    shown = json.loads(tools.call(inside, "tc", ["-statistics", "-json", "qdisc", "show", "dev", interface, "root"]))
    return int(shown[0]["bytes"])
