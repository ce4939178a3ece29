"""``thinwire repro lgreco``: section 3.6 and chapter 4 (L-GreCo) of "Communication-Efficient Distributed Training of
Deep Neural Networks" (Markov, PhD thesis, ISTA 2024) at the scale of two cores.

`tasks` says what is trained, `methods` what is compressed how; `gradients` are those along a training, `judged` says
what trainings show, `study` holds what the parts share. `of_quality` (Tables 4.1 to 4.3, Fig. B.2), `of_policies`
(Tables 3.8, 4.4 and 4.5, Fig. 3.7, 3.8 and 4.5a), `of_speed` (Fig. 4.3, 4.4 and B.3), `of_ranks` (Fig. 4.2),
`of_buckets` (Fig. 4.5b, B.1 and B.6b), `of_metric` (Fig. B.6a) and `of_solver` are the parts; `metric` is the
loss-based metric for any model; `command` is the command.
"""
