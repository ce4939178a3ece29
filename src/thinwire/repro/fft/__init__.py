"""``thinwire repro fft``: section 4 of "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural
Networks" (Wang et al., HPDC 2020) at the scale of two cores.

`images` and `task` say what is trained, `methods` how gradients travel, `rank` and `runs` do it; `reconstruct` and
`cost` are the arithmetic of the figures; `of_gradients`, `of_cost`, `of_theorems`, `of_methods` and `of_scaling` draw
them and judge the paper's claims; `command` is the command.
"""
