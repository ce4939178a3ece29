"""Chapter 3 (CGX) of "Communication-Efficient Distributed Training of Deep Neural Networks" (Markov, PhD thesis, ISTA
2024) at the scale of two cores.

`paper` holds its claims and parts, `measurements` how gradients are sent in each table, and what is measured and
drawn.
"""
