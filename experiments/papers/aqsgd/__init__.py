"""Section 4 and appendices D, H and I of "Fine-tuning Language Models over Slow Networks using Activation Quantization
with Guarantees" (AQ-SGD) at the scale of two cores.

`paper` holds the claims and parts. `tasks` says what is fine-tuned, `methods` how activations and gradients are sent,
`stages` how a network is cut; `rank` is what a process does, `trainings` and `timing` train and time, `study` holds
what the parts share, `judging` says what trainings show. `curves` (figures 1, 3, 7 to 9), `throughput` (tables 2 and 3,
figure 4, bits by link) and `resume` (kill and resume, appendix I) are the parts.
"""
