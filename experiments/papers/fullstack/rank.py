"""One rank of the full stack: a stage of one of the replicas. It does what a rank of the AQ-SGD repetition does, and
trains by itself: ``jobs``, of which each rank takes its share."""

# No `from __future__ import annotations` here: methods and tasks are made of plain values.

from collections.abc import Callable, Sequence
from typing import Any

from experiments.papers.aqsgd import rank as pipelines
from experiments.papers.fullstack import clusters, split, tensors
from experiments.papers.fullstack.grid import Grid
from experiments.papers.fullstack.methods import Method
from experiments.papers.fullstack.tasks import Stacked
from thinwire_tools.compare.rank_program import Channel, run_rank

_RUN: dict[str, Callable[[dict[str, Any], Callable[[int, float], None]], dict[str, Any]]] = {
    "split": split.run,
    "clusters": clusters.run,
    "tensors": tensors.run,
}


class Rank(pipelines.Rank):
    """Of a pipeline in replicas."""

    task_type = Stacked
    method_type = Method
    pipe_type = Grid

    @property
    def place(self) -> tuple[int, int]:
        num_stages = self.num_ranks // Stacked.replicas
        return self.rank % num_stages, num_stages

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "jobs":
            return {"results": self.jobs(command["kind"], command["jobs"])}
        return super().answer(command)

    def jobs(self, kind: str, jobs: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Results of this rank's share, by number."""

        def teller(number: int) -> Callable[[int, float], None]:
            return lambda step, loss: self.channel.send("step", job=number, step=step, loss=loss)

        mine = range(self.rank, len(jobs), self.num_ranks)
        return {number: _RUN[kind](jobs[number], teller(number)) for number in mine}


def _serve(channel: Channel) -> None:
    pipelines.serve(channel, Rank)


def main() -> None:
    run_rank(_serve)
