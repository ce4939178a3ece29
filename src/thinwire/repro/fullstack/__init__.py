"""``thinwire repro fullstack``: what "Fine-tuning Language Models over Slow Networks using Activation Quantization with
Guarantees" (AQ-SGD) does beyond the activations of one pipeline (section 4.3, appendices F, G and H.6), at the scale of
two cores.

`tasks` says what is trained, `ways` how activations and gradients travel, `grid` what a rank of a pipeline in replicas
has, `hooks` are PyTorch's own compression; `rank` is what a process does, `study` holds what the parts share.
`simulated` is a boundary within one process; across such ones `split` (with `resnet`), `clusters` and `tensors` train,
as `jobs` that ranks share among them. `of_figure5`, `of_adam`, `of_split`, `of_clusters`, `of_tensors` and `of_resume`
are the parts; `command` is the command.
"""
