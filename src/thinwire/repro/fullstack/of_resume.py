"""Kill and resume of the full stack: one of four processes is killed, and the training goes on from its checkpoint."""

from __future__ import annotations

from dataclasses import replace

from thinwire.repro.aqsgd.of_resume import checkpoint_every, killed, kills, steps_of
from thinwire.repro.aqsgd.rank import Asked
from thinwire.repro.findings import Finding
from thinwire.repro.fullstack.study import NUM_RANKS, Scale, Study
from thinwire.repro.fullstack.ways import aqsgd

_WAY = aqsgd(3, 6)


def resume_steps(scale: Scale) -> int:
    return steps_of(scale.small, kills(scale.small, scale.kills, NUM_RANKS, scale.small.exact_steps))


def resumed(study: Study) -> list[Finding]:
    """Killed where momenta travel, which owe error feedback what was not sent."""
    task = study.scale.small
    found = kills(task, study.scale.kills, NUM_RANKS, task.exact_steps)
    # Ranks 1 and 2: of either stage and of either replica.
    found = [replace(kill, rank=(kill.rank + 1) % NUM_RANKS) for kill in found]
    shower = study.shower(f"{_WAY.title}, not stopped")
    whole = study.trainings().train(task, _WAY, 0, shower, Asked(held_out=False))
    told = [killed(study, study.new_trainings, task, _WAY, kill, whole) for kill in found]
    good = sum(run.alike and same and run.kept == whole.kept for run, same in told)
    at = [f"rank {kill.rank} before step {kill.step + 1}" for kill in found]
    return [
        Finding(
            "resume",
            "bit_identical",
            float(good),
            "",
            "the full stack goes on from a checkpoint bit by bit: activations, momenta and what they owe",
            f"{good} of {len(told)} times the same losses, parameters and messages to the last bit; killed: "
            f"{', '.join(at)}; a checkpoint every {checkpoint_every(task)} of {task.steps} steps, momenta compressed "
            f"from step {task.exact_steps + 1} on",
            good == len(told),
            {"starts": [run.start for run, _ in told], "losses": whole.losses},
        )
    ]
