"""Policies as text, and what their parameters may be."""

from __future__ import annotations

import pytest

from thinwire import parse
from thinwire.compressors import PowerSGD, ef
from thinwire.policies import Accordion, KMeans, LGreco, parse_policy

POLICIES = [
    LGreco(),
    LGreco(every=100, warmup=50, window=7, lag=3),
    LGreco(families=("topk(density=0.1)", "ef(minmax(bits=3, bucket=64))")),
    LGreco(families=("powersgd(rank=32)",), bounds=(8, 64), step=4.0),
    LGreco(steps=5000, error="squared", alpha=1.5, objective="link"),
    LGreco(reference=Accordion(every=100, pair=("powersgd(rank=16)", "powersgd(rank=64)"), eta=0.25)),
    Accordion(),
    Accordion(every=500, pair=(2, 4)),
    KMeans(clusters=4, buckets=(1024, 128), top=0.05, alpha=2.0),
]


def test_a_policy_survives_its_text() -> None:
    for policy in POLICIES:
        again = parse_policy(str(policy))
        assert again == policy
        assert type(again) is type(policy)
        assert hash(again) == hash(policy)
        assert parse_policy(policy) is policy
    for text, policy in {
        "lgreco": LGreco(),
        " LGreco(every=500, warmup=100) ": LGreco(every=500, warmup=100),
        "lgreco(objective=time)": LGreco(objective="time"),
        "lgreco(reference=accordion)": LGreco(reference=Accordion()),
        "accordion()": Accordion(every=1000),
    }.items():
        assert parse_policy(text) == policy


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
