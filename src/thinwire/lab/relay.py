"""A switch that delays: it takes each frame off one rank's link and puts it on another's, rtt/2 later, in order.

Started by `thinwire.lab.network.Network` as a script (the standard library only) inside the hub's namespace, in
place of its bridge, for kernels without netem. It only delays: the token buckets at both ends of every link limit
the rate, and the queue before a rank's bucket is the one that overflows.

Frames are read and written with ``PACKET_VNET_HDR``: a segmented send crosses as the one large frame that the kernel
made of it, with its checksum and segment size in the header, as it would cross a bridge. One read and one write per
frame of up to 64 KiB is what lets Python carry a fast link.

`CEILING_BPS` is what the links of a lab with a latency may sum up to. Measured on two shared, busy cores of a cloud
machine with +1 ms, TCP streams both ways at once between two ranks: 0.92 of the rate each way at 100 Mbit/s, 0.93 at
1 Gbit/s, 0.89 at 2 Gbit/s (the ceiling) with a quarter of one core, and no frame lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

CEILING_BPS = 4_000_000_000
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


@dataclass
class Counters:
    """What the relay did with frames.

    ``queue_full`` are drops before a slow link, as any switch has them. The others are the relay's own and should be
    zero: ``memory_full`` (too many frames waited), ``read_late`` (the kernel's buffer overflowed before this process
    read it), ``failed`` (a frame that the kernel would not hand over or take back).
    """

    forwarded: int = 0
    queue_full: int = 0
    memory_full: int = 0
    read_late: int = 0
    failed: int = 0


def open_port(interface: str) -> socket.socket:
    """A packet socket on ``interface``: all frames that arrive there, none that leave."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setblocking(False)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for forced, ordinary in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        # Outside the machine's first user namespace only the ordinary one is allowed, up to the system's limit.
        try:
            port.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER_BYTES)
        except PermissionError:
            port.setsockopt(socket.SOL_SOCKET, ordinary, SOCKET_BUFFER_BYTES)
    port.bind((interface, ETH_P_ALL))
    return port


class Relay:
    """Forwards frames between ``interfaces``, each with the Ethernet address behind it, ``delay_s`` after arrival.

    At most ``memory_bytes`` of frames wait; what comes on top is dropped and counted.
    """

    def __init__(self, interfaces: dict[str, bytes], delay_s: float, memory_bytes: int) -> None:
        self.ports = {open_port(interface): mac for interface, mac in interfaces.items()}
        self.by_mac = {mac: port for port, mac in self.ports.items()}
        self.delay_s = delay_s
        self.memory_bytes = memory_bytes
        self.waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self.waiting_bytes = 0
        self.counters = Counters()

    def receive(self, port: socket.socket) -> None:
        """Take some frames off ``port`` and give each its time to leave."""
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
                waiting.append((now() + delay, target, frame))
                self.waiting_bytes += len(frame)
            elif mac and mac[0] & GROUP_BIT:
                for other in self.ports:
                    if other is not port:
                        waiting.append((now() + delay, other, frame))
                        self.waiting_bytes += len(frame)

    def send_due(self) -> float | None:
        """Send what is due; seconds until the next frame is, None when none waits."""
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
        """Add what the kernel dropped because this process did not read in time (reading resets its counter)."""
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
    delay_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    interfaces = {name: bytes.fromhex(mac) for name, mac in (port.split("=") for port in sys.argv[3:])}
    relay = Relay(interfaces, delay_s, memory_bytes)
    # A relay that waits for a core adds to the delay; going before the ranks is a right that not everyone has.
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
