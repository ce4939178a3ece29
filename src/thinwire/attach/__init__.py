"""What a Wire can be attached to, one file per thing that PyTorch lets us attach to."""

from thinwire.attach.compress import compress
from thinwire.attach.fsdp import prefetch
from thinwire.attach.group_options import ProcessGroupOptions
from thinwire.attach.pipeline.stats import PipelineStats
from thinwire.attach.process_group import ProcessGroup, register_backend, register_model
from thinwire.attach.trainers import lightning_callback, trainer_callback

__all__ = [
    "PipelineStats",
    "ProcessGroup",
    "ProcessGroupOptions",
    "compress",
    "lightning_callback",
    "prefetch",
    "register_model",
    "trainer_callback",
]

register_backend()
