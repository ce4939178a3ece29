"""Plans of pipelines: simulated steps, and the search for the fastest."""

from thinwire_tools.planner.schedules import PYTORCH_CLASSES, SCHEDULES, Schedule, ScheduleName
from thinwire_tools.planner.search import (
    REFERENCE,
    Choice,
    Layer,
    Link,
    Machine,
    PipelinePlan,
    PipelineProblem,
    even_plan,
    plan_pipeline,
)
from thinwire_tools.planner.simulate import Boundary, LinkCost, Simulated, Span, StageTimes, simulate

__all__ = [
    "PYTORCH_CLASSES",
    "REFERENCE",
    "SCHEDULES",
    "Boundary",
    "Choice",
    "Layer",
    "Link",
    "LinkCost",
    "Machine",
    "PipelinePlan",
    "PipelineProblem",
    "Schedule",
    "ScheduleName",
    "Simulated",
    "Span",
    "StageTimes",
    "even_plan",
    "plan_pipeline",
    "simulate",
]
