"""What the AQ-SGD paper (Wang et al., NeurIPS 2022) does beyond activations of a pipeline, at the scale of two cores:
gradients compressed as well, split learning, cluster centers, and tensor parallelism.

`paper` holds its claims and parts, `measurements` what is measured and drawn. Trainings are described in `tasks` and
`methods`; a rank of the pipelines in replicas is in `grid`, and `split`, `clusters` and `tensors` train in one process.
"""
