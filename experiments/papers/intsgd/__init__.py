"""Sections 5 and C of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients" (Mishchenko et al., ICLR 2022)
at the scale of two cores.

`paper` holds the claims and parts. Part (a): `datasets` says what is minimized, `world` how its twelve workers do it,
`convex` runs and draws it all. Parts (b) and (c) are `networks`.
"""
