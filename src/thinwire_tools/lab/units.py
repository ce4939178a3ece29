"""Rates, times and shares as people write them for links: ``100mbit``, ``2.5gbit``, ``20ms``, ``1%``."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
MAX_RATE_BPS = 10**15
MAX_TIME_S = 3600.0
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+|%)")


def _parse(text: str, units: dict[str, float] | dict[str, int], form: str) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {form}")
    return float(match[1]) * units[match[2]]


def parse_rate(text: str) -> int:
    """Return the bits per second of ``"100mbit"``, ``"1gbit"``, ``"500kbit"``, ``"2.5gbit"``; decimal units.

    Raises:
        ValueError: ``text`` is not a number and a unit, or less than 1 kbit/s or more than 1000 Tbit/s.
    """
    rate = _parse(text, _BITS, "a rate: write a number and kbit, mbit or gbit, as in 100mbit or 2.5gbit")
    if rate < 1000:
        raise ValueError(f"{text!r} is too slow to be a link: the least is 1kbit")
    if rate > MAX_RATE_BPS:
        raise ValueError(f"{text!r} is too fast to be a link: the most is 1000tbit")
    return round(rate)


def parse_time(text: str) -> float:
    """Return the seconds of ``"20ms"``, ``"500us"``, ``"0.1s"``.

    Raises:
        ValueError: ``text`` is not a number and a unit, or more than an hour.
    """
    seconds = _parse(text, _SECONDS, "a time: write a number and s, ms or us, as in 20ms")
    if seconds > MAX_TIME_S:
        raise ValueError(f"{text!r} is too long: the most is {MAX_TIME_S:g}s")
    return seconds


def parse_share(text: str) -> float:
    """Return the share of ``"1%"`` or ``"0.5%"``, below one half.

    Raises:
        ValueError: ``text`` is not a number and %, or half of all or more.
    """
    share = _parse(text, {"%": 0.01}, "a share: write a number and %, as in 1%")
    if share >= 0.5:
        raise ValueError(f"{text!r} is too much of a link: write less than 50%")
    return share


def parse_rates(rate: str | Sequence[str], num_ranks: int) -> tuple[int, ...]:
    """Parse the bits per second of each rank's link: one rate for all or one for each (``"1gbit,100mbit"`` or a list).

    Raises:
        ValueError: a part is not a rate, or there are neither one nor ``num_ranks`` of them.
    """
    parts = rate.split(",") if isinstance(rate, str) else list(rate)
    rates = tuple(parse_rate(part) for part in parts)
    if len(rates) == 1:
        return rates * num_ranks
    if len(rates) != num_ranks:
        raise ValueError(f"{len(rates)} rates for {num_ranks} ranks: give one for all, or one for each")
    return rates


def _format(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Format ``value`` in the first of ``units`` (largest first) that it reaches, to three digits."""
    name, size = next((unit for unit in units if value >= unit[1]), units[-1])
    number = value / size
    return f"{number:.3g} {name}" if number < 999.5 else f"{number:.0f} {name}"


def format_rate(rate_bps: float) -> str:
    """Format 100 000 000 as ``"100 Mbit/s"``."""
    return _format(rate_bps, (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1)))


def format_bytes(num_bytes: float) -> str:
    """Format 62 500 as ``"62.5 kB"``; decimal units, as rates have."""
    return _format(num_bytes, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def duration(seconds: float) -> str:
    """Format 0.0123 as ``"12.3 ms"``."""
    return _format(seconds, (("s", 1), ("ms", 1e-3)))
