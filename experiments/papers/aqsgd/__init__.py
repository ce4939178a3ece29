"""Section 4 and the appendices of "Fine-tuning Language Models over Slow Networks using Activation Quantization with
Guarantees" (AQ-SGD) at the scale of two cores.

`paper` holds the claims and parts. `tasks` says what is fine-tuned, `methods` how activations and gradients are sent,
`stages` how a network is cut; `trainings` and `timing` train and time, `study` holds what the parts share. `curves`
(figures 1, 3, 7 to 9, appendix I) and `throughput` (tables 2 and 3, figure 4) are the parts. The second
half is the full stack, in replicas: its claims are in `stack_paper`, its parts in `stack`, and `split` and `simulated`
train in one process.
"""
