"""Policies, which choose other plans from time to time while a model trains (thesis, sections 3.6 and 4.4)."""

from thinwire.policies.accordion import Accordion as Accordion
from thinwire.policies.auto import Auto as Auto
from thinwire.policies.by_link import ByLink as ByLink, LinkChoice as LinkChoice, choose_by_link as choose_by_link
from thinwire.policies.families import family as family
from thinwire.policies.kmeans import KMeans as KMeans
from thinwire.policies.lgreco import LGreco as LGreco
from thinwire.policies.policy import (
    Evidence as Evidence,
    Policy as Policy,
    Proposal as Proposal,
    StepTime as StepTime,
    Sync as Sync,
    parse_policy as parse_policy,
)
