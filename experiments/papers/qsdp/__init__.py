"""Chapter 5 (QSDP) of "Communication-Efficient Distributed Training of Deep Neural Networks" (Markov, PhD thesis, ISTA
2024) at the scale of two cores.

`paper` holds its claims and parts; `measurements` what is measured and drawn of perplexity and of steps. `methods`
describes what is trained and how it is sent, `sharding` how a rank process does so, `trainings` what is known of it.
"""
