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

# Of each layer: gradient, numel, before, after, kept and added of its square, the same of its momentum, eps, factor.
def adam_normalize(*layers: float) -> None: ...

# Of each layer: weights, update, numel, before, after, kept and added of its momentum, kept, size.
def adam_apply(*layers: float) -> None: ...
def factor_rows(
    matrix: int, count: int, stride: int, rows: int, columns: int, rank: int, right: int, out: int, normalized: bool, /
) -> None: ...
def factor_columns(
    matrix: int, count: int, stride: int, rows: int, columns: int, rank: int, left: int, out: int, /
) -> None: ...
def factor_product(
    matrix: int,
    count: int,
    stride: int,
    rows: int,
    columns: int,
    rank: int,
    left: int,
    right: int,
    scale: float,
    add: bool,
    /,
) -> None: ...
def factor_basis(count: int, rows: int, rank: int, left: int, out: int, /) -> None: ...

# Of each vector: address, numel, lanes, out.
def square_sums(*vectors: int) -> None: ...

# Of each vector: address, numel, lanes, size, runs, order, signs, out.
def sketches(*vectors: int) -> None: ...
def natural_encode(x: int, dtype: int, rows: int, num_rows: int, message: int, shift: int, key: int, /) -> None: ...
def natural_decode(message: int, rows: int, num_rows: int, y: int, dtype: int, add: bool, scale: float, /) -> None: ...
def rangefloat_encode(
    x: int, dtype: int, rows: int, num_rows: int, message: int, params: int, bits: int, rounding: int, key: int, /
) -> None: ...
def rangefloat_decode(
    message: int, rows: int, num_rows: int, y: int, dtype: int, bits: int, add: bool, scale: float, /
) -> None: ...
def levels_encode(
    x: int, dtype: int, rows: int, num_rows: int, message: int, levels: int, bits: int, bucket: int, /
) -> None: ...
def levels_decode(
    message: int, rows: int, num_rows: int, y: int, dtype: int, bits: int, bucket: int, add: bool, scale: float, /
) -> None: ...
def magnitudes_encode(
    x: int,
    dtype: int,
    rows: int,
    num_rows: int,
    message: int,
    magnitudes: int,
    bits: int,
    bucket: int,
    now: int,
    next: int,
    loss_scale: float,
    /,
) -> None: ...
def magnitudes_decode(
    message: int,
    rows: int,
    num_rows: int,
    y: int,
    dtype: int,
    magnitudes: int,
    bits: int,
    bucket: int,
    add: bool,
    scale: float,
    /,
) -> None: ...
def int_round(
    x: int,
    dtype: int,
    rows: int,
    num_rows: int,
    alphas: int,
    out: int,
    width: int,
    clip: float,
    key: int,
    nearest: bool,
    clipped: int,
    /,
) -> None: ...
def int_decode(integers: int, width: int, rows: int, num_rows: int, y: int, dtype: int, factors: int, /) -> None: ...
def pick(
    x: int,
    dtype: int,
    start: int,
    numel: int,
    k: int,
    least: int,
    partial: bool,
    sampled: bool,
    offset: int,
    stride: int,
    num_samples: int,
    rank: int,
    indices: int,
    values: int,
    /,
) -> tuple[int, int, bool]: ...
def abs_histogram(x: int, dtype: int, start: int, numel: int, counts: int, /) -> None: ...
def pack_indices(indices: int, count: int, numel: int, k: int, bitmap: bool, bytes: int, /) -> bool: ...
def unpack_indices(bytes: int, numel: int, k: int, bitmap: bool, indices: int, /) -> int: ...
def sparse_scatter(
    y: int, dtype: int, start: int, numel: int, indices: int, values: int, count: int, scale: float, /
) -> bool: ...
def spectrum_encode(
    x: int,
    dtype: int,
    rows: int,
    num_rows: int,
    message: int,
    parts: int,
    block: int,
    roots: int,
    kept: int,
    tops: int,
    /,
) -> None: ...
def spectrum_decode(
    rows: int,
    num_rows: int,
    y: int,
    dtype: int,
    block: int,
    roots: int,
    kept: int,
    tops: int,
    add: bool,
    scale: float,
    /,
    *messages: int,
) -> None: ...
def shared_post(word: int, value: int, /) -> None: ...
def shared_read(word: int, /) -> int: ...
def shared_wait(word: int, value: int, timeout_ns: int, spin_ns: int, /) -> bool: ...
def raw_encode(x: int, dtype: int, rows: int, num_rows: int, message: int, /) -> None: ...
def raw_decode(message: int, rows: int, num_rows: int, y: int, dtype: int, add: bool, scale: float, /) -> None: ...
def raw_sum(
    own: int,
    own_dtype: int,
    rows: int,
    num_rows: int,
    y: int,
    dtype: int,
    out_message: int,
    scale: float,
    /,
    *messages: int,
) -> None: ...
def rows_add(
    x: int,
    dtype: int,
    rows: int,
    num_rows: int,
    other: int,
    other_dtype: int,
    out: int,
    out_dtype: int,
    alpha: float,
    /,
) -> None: ...
def rows_scale(
    x: int, dtype: int, rows: int, num_rows: int, out: int, out_dtype: int, by: float, over: float, /
) -> None: ...
def checksum(message: int, num_bytes: int, /) -> int: ...
def interface() -> str: ...
def levels() -> list[str]: ...
def level() -> str: ...
def set_level(name: str, /) -> None: ...
def set_parallel_for(address: int, /) -> None: ...
