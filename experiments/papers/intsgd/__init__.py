"""Sections 5 and C of "IntSGD: Adaptive Floatless Compression of Stochastic Gradients" (Mishchenko et al., ICLR 2022)
at the scale of two cores.

`paper` holds the claims and parts. Parts (b) and (c) are `networks`; of part (a) there is the record, of which
`convex` makes what is judged.
"""
