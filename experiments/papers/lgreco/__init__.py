"""Section 3.6 and chapter 4 of Markov's thesis, L-GreCo, at the scale of two cores.

`paper` holds the claims and parts, `methods` what is trained and compressed, `study` what parts measure with. `quality`
trains, `speed` times; `laboratory` works on gradients along a training.
"""
