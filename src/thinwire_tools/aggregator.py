"""``thinwire aggregator``: serve until Ctrl-C."""

from __future__ import annotations

import signal
import ssl
import time
from pathlib import Path

from rich.console import Console

from thinwire_tools.exits import ends_command


def aggregator(
    *,
    host: str = "127.0.0.1",
    port: int = 29600,
    slots: int = 128,
    shares: int = 4,
    idle_timeout: float = 3600.0,
    token_file: Path | None = None,
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Add up integers for the workers of a training, as SwitchML's programmable switch does. Ends with Ctrl-C.

    Workers send integers in chunks to a bounded pool of slots; once all have contributed to a slot, all get the sum.
    It never sees a float, and serves several trainings at once. Without a token anybody who can connect can take part,
    and without TLS the network can read what is sent: then use it in a trusted network only.

    Examples:
      thinwire aggregator --host 0.0.0.0 --port 29600 --slots 256
      network = thinwire.Network(aggregator="10.0.0.1:29600")
      wire = thinwire.compress(model, "intsgd(bits=8)", network=network)

    Args:
        host: where to listen; 0.0.0.0 for all interfaces.
        port: 0 takes a free one.
        slots: chunks of up to 32768 integers that may be under way at once; each takes 256 KiB.
        shares: a training that asks for no number of slots gets the total divided by this.
        idle_timeout: seconds after which a training that sends nothing is ended, and its slots are free.
        token_file: a file whose text workers must know, as in AggregatorAddress(address, token=text).
        tls_certificate: a certificate chain (PEM): connections are encrypted, and workers check whom they talk to.
        tls_key: its private key, if it is not in the same file.

    Returns:
        The exit code: 0 after Ctrl-C.
    """
    from thinwire.aggregator.server import Aggregator, Limits

    console = Console(highlight=False)
    with ends_command(ValueError, OSError):
        server = Aggregator(
            host,
            port,
            limits=Limits(slots, shares=shares, idle_timeout_s=idle_timeout),
            token=_token(token_file),
            tls=_tls(tls_certificate, tls_key),
            log=lambda line: console.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, soft_wrap=True),
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    with server:
        console.print(f"aggregator at [bold]{server.address}[/], {slots} slots; Ctrl-C ends it")
        server.serve()
        counters = server.counters
    console.print(
        f"served {counters.sessions} sessions, {counters.chunks} chunks: {counters.received_bytes / 1e6:.1f} MB in, "
        f"{counters.sent_bytes / 1e6:.1f} MB out"
    )
    return 0


def _token(path: Path | None) -> str:
    """Return the text of a token file, without the white space around it."""
    if path is None:
        return ""
    if not (token := path.read_text().strip()):
        raise ValueError(f"{path} is empty: write a token into it, such as that of `openssl rand -hex 32`")
    return token


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise ValueError("--tls-key needs --tls-certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context
