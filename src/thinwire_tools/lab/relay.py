"""A switch that delays, loses and refuses: it takes each frame off one rank's link and puts it on another's, rtt/2
later, in order, or drops it.

Started by `thinwire_tools.lab.network.Network` as a script (the standard library only) inside the hub's namespace, in
place of its bridge, for kernels without netem. It limits no rate: the token buckets at both ends of every link do,
and the queue before a rank's bucket is the one that overflows.

Frames are read and written with ``PACKET_VNET_HDR``: a segmented send crosses as the one large frame that the kernel
made of it, with its checksum and segment size in the header, as it would cross a bridge. One read and one write per
frame of up to 64 KiB is what lets Python carry a fast link. A lossy link has packets of the MTU instead, so that each
is lost by itself.

`CEILING_BPS` is what the links of a lab with a latency may sum up to. Measured on two shared, busy cores of a cloud
machine with +1 ms, TCP streams both ways at once between two ranks: 0.92 of the rate each way at 100 Mbit/s, 0.93 at
1 Gbit/s, 0.89 at 2 Gbit/s (the ceiling) with a quarter of one core, and no frame lost. A lossy link's packets take
about 20 us of a core each, so that `LOSSY_CEILING_BPS` takes most of one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

CEILING_BPS = 4_000_000_000
LOSSY_CEILING_BPS = 400_000_000
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_ALL = 3
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
VNET_HEADER_BYTES = 10
SOCKET_BUFFER_BYTES = 2**25
LARGEST_FRAME_BYTES = VNET_HEADER_BYTES + 18 + 65536
FRAMES_A_TURN = 32
# The group bit of an Ethernet address: broadcast and multicast go to every other port.
GROUP_BIT = 1
ETH_P_IP = b"\x08\x00"
TCP = 6
TCP_SYN, TCP_ACK = 0x02, 0x10


@dataclass
class Counters:
    """Counters of the relay's frames.

    ``lost`` are those that the link was to lose, ``refused`` connections to a node behind NAT, ``queue_full`` drops
    before a slow link, as any switch has them. The others are the relay's own and should be zero: ``memory_full`` (too
    many frames waited), ``read_late`` (the kernel's buffer overflowed before this process read it), ``failed`` (a frame
    that the kernel would not hand over or take back).
    """

    forwarded: int = 0
    lost: int = 0
    refused: int = 0
    queue_full: int = 0
    memory_full: int = 0
    read_late: int = 0
    failed: int = 0


def open_port(interface: str) -> socket.socket:
    """Return a packet socket on ``interface``: frames received there, not those sent."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setblocking(False)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for forced, ordinary in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        # Only the first user namespace of the machine may force the size; others get up to the system's limit.
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER_BYTES)
        except PermissionError:
            port.setsockopt(socket.SOL_SOCKET, ordinary, SOCKET_BUFFER_BYTES)
    port.bind((interface, ETH_P_ALL))
    return port


def opens_connection(frame: bytes) -> bool:
    """Whether ``frame``, behind its virtio header, is the first of a TCP connection over IPv4."""
    ethernet, ip = VNET_HEADER_BYTES, VNET_HEADER_BYTES + 14
    if frame[ethernet + 12 : ip] != ETH_P_IP or len(frame) < ip + 20 or frame[ip + 9] != TCP:
        return False
    flags = ip + 4 * (frame[ip] & 0x0F) + 13
    return len(frame) > flags and frame[flags] & (TCP_SYN | TCP_ACK) == TCP_SYN


class Relay:
    """Forwards frames between ``interfaces``, each with the Ethernet address behind it, ``delay_s`` after arrival.

    A share ``loss`` of those to a single rank is dropped, each by a draw of its own. At most ``memory_bytes`` of frames
    wait; further ones are dropped and counted. No connection can be opened to the interfaces in ``nat``.
    """

    def __init__(
        self, interfaces: dict[str, bytes], delay_s: float, loss: float, memory_bytes: int, nat: set[str]
    ) -> None:
        self.ports = {open_port(interface): mac for interface, mac in interfaces.items()}
        self.by_mac = {mac: port for port, mac in self.ports.items()}
        self.nat = {self.by_mac[interfaces[name]] for name in nat}
        self.delay_s, self.loss = delay_s, loss
        self.memory_bytes = memory_bytes
        self.waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self.waiting_bytes = 0
        self.counters = Counters()

    def receive(self, port: socket.socket) -> None:
        """Read some frames from ``port`` and set the time at which each is sent."""
        now = time.monotonic
        waiting, delay, to = self.waiting, self.delay_s, self.by_mac
        for _ in range(FRAMES_A_TURN):
            try:
                frame = port.recv(LARGEST_FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self.counters.failed += 1
                continue
            if self.waiting_bytes + len(frame) > self.memory_bytes:
                self.counters.memory_full += 1
                continue
            mac = frame[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]
            target = to.get(mac)
            if target is not None:
                if self.loss and random.random() < self.loss:
                    self.counters.lost += 1
                    continue
                if target in self.nat and opens_connection(frame):
                    self.counters.refused += 1
                    continue
                waiting.append((now() + delay, target, frame))
                self.waiting_bytes += len(frame)
            elif mac and mac[0] & GROUP_BIT:
                for other in self.ports:
                    if other is not port:
                        waiting.append((now() + delay, other, frame))
                        self.waiting_bytes += len(frame)

    def send_due(self) -> float | None:
        """Send the frames that are due; return the seconds until the next one is, None when none waits."""
        waiting, counters = self.waiting, self.counters
        for _ in range(4 * FRAMES_A_TURN):
            if not waiting:
                return None
            left = waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, target, frame = waiting.popleft()
            self.waiting_bytes -= len(frame)
            try:
                target.send(frame)
                counters.forwarded += 1
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                    counters.queue_full += 1
                else:
                    counters.failed += 1
        return 0.0

    def read_losses(self) -> None:
        """Add the frames that the kernel dropped because this process was late (reading resets its counter)."""
        for port in self.ports:
            answer = port.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
            self.counters.read_late += int.from_bytes(answer[4:8], sys.byteorder)

    def run(self) -> None:
        """Forward until standard input ends; a line on it is answered with the counters, as JSON."""
        sources = [0, *self.ports]
        wait: float | None = None
        while True:
            for source in select.select(sources, (), (), wait)[0]:
                if source != 0:
                    self.receive(source)
                elif os.read(0, 4096):
                    self.read_losses()
                    sys.stdout.write(json.dumps(vars(self.counters)) + "\n")
                    sys.stdout.flush()
                else:
                    return
            wait = self.send_due()


def main() -> None:
    delay_s, loss, memory_bytes = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    nat = set(sys.argv[4].split(",")) - {""}
    interfaces = {name: bytes.fromhex(mac) for name, mac in (port.split("=") for port in sys.argv[5:])}
    relay = Relay(interfaces, delay_s, loss, memory_bytes, nat)
    # A relay that waits for a core adds to the delay, but not everyone may raise its priority.
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
