"""``thinwire repro aqsgd``: section 4 and appendices D, H and I of "Fine-tuning Language Models over Slow Networks
using Activation Quantization with Guarantees" (AQ-SGD) at the scale of two cores.

`tasks` says what is fine-tuned, `ways` how activations and gradients travel, `stages` how a network is cut; `rank` is
what a process does, `trainings` and `contest` train and time, `study` holds what the parts share, `judged` says what
trainings show. `of_curves` (Figures 1, 3, 7 to 9), `of_throughput` (Table 2), `of_breakdown` (Table 3), `of_time`
(Figure 4), `of_resume` and `of_completions` (appendix I) are the parts; `command` is the command.
"""
