"""``thinwire repro qsdp``: chapter 5 (QSDP) and appendix C of "Communication-Efficient Distributed Training of Deep
Neural Networks" (Markov, PhD thesis, ISTA 2024) at the scale of two cores.

`sizes` says what is trained, `ways` how weights and gradients travel, `sharding` how FSDP2 runs it; `rank` is what a
process does, `trainings` and `contest` train and time, `study` holds what the parts share, `judged` says what trainings
show. `of_quality` (Tables 5.1 and 5.2, Fig. C.4), `of_levels` (Tables 5.3 and C.3), `of_errors` (Figs. C.2 and C.3),
`of_regression` (Fig. C.5), `of_bandwidth` (Fig. 5.3), `of_time` (Fig. 5.2), `of_ratios` (Fig. C.1, Table C.2) and
`of_bytes` are the parts; `command` is the command.
"""
