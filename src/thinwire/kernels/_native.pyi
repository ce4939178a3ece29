# The native CPU core (native/binding.cpp). Addresses and sizes are ints, and are not checked; `form`, `bucket` and
# `clip` are `Format.packed`.

def encode(
    x: int,
    dtype: int,
    rows: int,
    num_rows: int,
    message: int,
    form: int,
    bucket: int,
    clip: float,
    key: int,
    now: int,
    next: int,
    loss_scale: float,
    /,
) -> None: ...
def decode(
    message: int,
    rows: int,
    num_rows: int,
    y: int,
    dtype: int,
    form: int,
    bucket: int,
    clip: float,
    add: bool,
    scale: float,
    /,
) -> None: ...
def sum(
    own: int,
    own_dtype: int,
    rows: int,
    num_rows: int,
    y: int,
    dtype: int,
    form: int,
    bucket: int,
    clip: float,
    scale: float,
    /,
    *messages: int,
) -> None: ...
def reduce(
    own: int,
    own_dtype: int,
    rows: int,
    num_rows: int,
    out_message: int,
    y: int,
    dtype: int,
    form: int,
    bucket: int,
    clip: float,
    scale: float,
    key: int,
    now: int,
    next: int,
    loss_scale: float,
    /,
    *messages: int,
) -> None: ...
def checksum(message: int, num_bytes: int, /) -> int: ...
def levels() -> list[str]: ...
def level() -> str: ...
def set_level(name: str, /) -> None: ...
def set_parallel_for(address: int, /) -> None: ...
