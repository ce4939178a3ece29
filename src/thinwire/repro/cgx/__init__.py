"""``thinwire repro cgx``: chapter 3 (CGX) of "Communication-Efficient Distributed Training of Deep Neural Networks"
(Markov, PhD thesis, ISTA 2024) at the scale of two cores.

`models` says what is trained, `ways` how gradients travel; `rank` and `contest` time them in turns, `study` holds what
the parts share, `judging` says what measurements show. `of_bandwidth` (Fig. 3.1), `of_places` (Fig. 3.3, Table 3.9),
`of_schemes` (Table 3.4), `of_quality` (Table 3.5), `of_systems` (Tables 3.6 and 3.7) and `of_blob` (QNCCL) are the
parts; `command` is the command.
"""
