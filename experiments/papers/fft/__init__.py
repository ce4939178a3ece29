"""Section 4 of "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural Networks" (Wang et al.,
HPDC 2020) at the scale of two cores.

`paper` holds its claims and parts, `methods` the compressors, `measurements` what is measured and drawn for each
figure, and `reconstruct` the arithmetic of what receivers see.
"""
