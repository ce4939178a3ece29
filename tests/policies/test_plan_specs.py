"""Policies as text, and what their parameters may be."""

from __future__ import annotations

import pytest

from thinwire import parse
from thinwire.compressors import PowerSGD, ef
from thinwire.policies import Accordion, KMeans, LGreco


def test_windows_and_lags_follow_the_interval() -> None:
    assert (LGreco(every=500).window_steps, LGreco(every=500).lag_steps) == (50, 25)
    assert (LGreco(every=2).window_steps, LGreco(every=2).lag_steps) == (1, 1)
    assert LGreco(every=20, lag=19).window_steps == 1


def test_policies_are_checked_before_training() -> None:
    no_family, shapes = {"up": parse("natural")}, {"up": (128, 64)}
    families = ("minmax(bits=3)", "topk(density=0.05)", "powersgd(rank=4)")
    for policy in (LGreco(), KMeans(), Accordion(), LGreco(families=families, reference=Accordion())):
        with pytest.raises(ValueError, match="natural"):
            policy.check(no_family, shapes)
    LGreco(families=families).check(no_family, shapes)
    assert LGreco(families=families, objective="link").to_time(no_family) >= {ef(PowerSGD(rank=8))}
