"""``thinwire repro intsgd``: sections 5 and C of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients"
(Mishchenko et al., ICLR 2022) at the scale of two cores.

`datasets` and `logistic` say what part (a) minimises, `world` how its twelve workers do.
"""
