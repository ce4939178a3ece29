"""``thinwire repro intsgd``: sections 5 and C of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients"
(Mishchenko et al., ICLR 2022) at the scale of two cores.

Part (a): `datasets` and `logistic` say what is minimised, `world` how its twelve workers do it, `convex` runs it all
and `of_convex` draws and judges. Part (b): `tasks` says what is trained, `ways` how gradients travel, `rank` and
`timing` time them, `of_training` draws and judges. Part (c) is `of_sensitivity`. `command` is the command.
"""
