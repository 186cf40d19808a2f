"""GPU attention of patches, which all see each other, or those of their window: Triton kernels.

A head is read as a power of two and a rest (72 elements as 64 and 16) if that is less than the next power of two;
torch's kernels read 96. A patch's results depend only on the patches that it sees.

Knows tensors, not models. Callers get it from `gpu_library`, the only place where Triton is imported.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from keepsight.models.gpu_shares import padded

# Rows and keys of a program, by the bytes of an element. Tensor cores do not multiply 4-byte elements, and registers
# hold fewer of them.
MOST_ROWS = {2: 128, 4: 32}
NUM_KEYS = {2: 64, 4: 16}
BYTES_OF_ROWS = 24 * 1024
# Pipeline stages of keys: all but one are in flight.
MOST_STAGES = 3
NUM_WARPS = 4
# Shared memory for rows, and keys and values of all stages: available on any GPU.
BYTES_OF_ALL = 96 * 1024
# Elements of a head that a program places, over consecutive patches; and heads, which share the loaded angles.
PLACED_AT_ONCE, HEADS_AT_ONCE = 512, 4


def place_patches(projected: Tensor, angles: tuple[Tensor, Tensor] | None, heads: Tensor) -> None:
    """Copy `projected` [pictures, patches, 3, heads, head_dim] to `heads`, which `attend_to_all` reads.

    `angles`, each [patches, 1, head_dim], rotate queries and keys; the first half of the sines is negated.
    """
    pictures, patches, _, num_heads, dim = projected.shape
    assert heads.permute(0, 2, 3, 1, 4).is_contiguous()
    cos, sin = angles or (projected, projected)
    assert all(each.is_contiguous() for each in (projected, cos, sin))
    numbers, at_once = patches * dim, math.gcd(num_heads, HEADS_AT_ONCE)
    programs = (triton.cdiv(numbers, PLACED_AT_ONCE), 3 * num_heads // at_once, pictures)
    _place_patches[programs](
        heads, projected, cos, sin, numbers,
        ROTATES=angles is not None, HEADS=num_heads, DIM=dim, AT_ONCE=at_once, NUMBERS=PLACED_AT_ONCE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["numbers"])
def _place_patches(
    heads, projected, cos, sin, numbers,
    ROTATES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    first, picture = tl.program_id(1) * AT_ONCE, tl.program_id(2).to(tl.int64)
    is_there = at < numbers
    to = heads + (picture * (3 * HEADS) + first) * numbers
    source = projected + picture * (3 * HEADS) * numbers + first * DIM + (at // DIM) * (3 * HEADS * DIM)
    if ROTATES:
        is_rotated = is_there & (first < 2 * HEADS)  # values are not
        by_cos = tl.load(cos + at, mask=is_rotated, other=1.0)
        by_sin = tl.load(sin + at, mask=is_rotated, other=0.0)
    for head in tl.static_range(AT_ONCE):
        given = tl.load(source + head * DIM + at % DIM, mask=is_there, other=0.0)
        if ROTATES:
            # The other coordinate of each pair.
            other = tl.load(source + head * DIM + (at + DIM // 2) % DIM, mask=is_rotated, other=0.0)
            given = (given.to(tl.float32) * by_cos + other.to(tl.float32) * by_sin).to(given.dtype)
        tl.store(to + head * numbers + at, given, mask=is_there)


def attend_to_all(
    heads: Tensor,  # [pictures, patches, 3, heads, head_dim], as a view of [pictures, 3, heads, patches, head_dim]
    attended: Tensor,  # [pictures, patches, heads, head_dim]
    first: int,
    end: int,
    size: int,
    scale: float,
) -> None:
    """Compute attention into `attended`; patches [first, end) see each other in consecutive windows of `size`."""
    pictures, patches, num_heads, dim = attended.shape
    assert heads.permute(0, 2, 3, 1, 4).is_contiguous()
    assert attended.is_contiguous()
    assert (end - first) % size == 0
    tiles = tiles_of(dim, heads.itemsize)
    programs = (end - first) // size * triton.cdiv(size, tiles["ROWS"])
    scale /= math.log(2)  # the kernel computes powers of 2
    _attend_to_all[(programs, num_heads, pictures)](
        attended, heads, patches, first, size, scale, HEADS=num_heads, WHOLE=size % tiles["KEYS"] == 0, **tiles
    )


def tiles_of(dim: int, bytes_per_number: int) -> dict[str, int]:
    """Return the tile sizes and launch options of a program."""
    width = padded(dim)
    main, rest = width // 2, padded(dim - width // 2)
    if main + rest >= width:
        main, rest = width, 0
    of_row = (main + rest) * bytes_per_number
    rows = min(MOST_ROWS[bytes_per_number], triton.next_power_of_2(BYTES_OF_ROWS // of_row + 1) // 2)
    keys = NUM_KEYS[bytes_per_number]
    stages = min(MOST_STAGES, (BYTES_OF_ALL - rows * of_row) // (2 * keys * of_row))
    tiles = {"DIM": dim, "MAIN": main, "REST": rest, "ROWS": rows, "KEYS": keys}
    return {**tiles, "num_stages": stages, "num_warps": NUM_WARPS}


# Compiled in two variants for all sizes: if keys fill whole blocks no mask is needed, which saves a tenth of the time.
# A separate last block after a loop of whole ones would serve all sizes, but compiled by Triton 3.6, on an H100, it
# read shared memory out of bounds.
@triton.jit(do_not_specialize=["patches", "first", "size"])
def _attend_to_all(
    attended, heads, patches, first, size, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(size, ROWS)
    window, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, picture = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = first + window * size
    # Computed from the constant DIM instead of a stride argument: the compiler then knows the rows' alignment.
    of_head = patches.to(tl.int64) * DIM
    query = heads + (picture * (3 * HEADS) + head) * of_head + begin * DIM
    key = query + HEADS * of_head
    value = key + HEADS * of_head
    rows = block * ROWS + tl.arange(0, ROWS)
    query_main = _read(query, rows, size, 0, MAIN, DIM, False)
    query_rest = _read(query, rows, size, MAIN, REST, DIM, False) if REST > 0 else query_main
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    main = tl.zeros([ROWS, MAIN], tl.float32)
    rest = tl.zeros([ROWS, REST], tl.float32) if REST > 0 else main
    for start in range(0, size, KEYS):
        top, total, main, rest = _attend_to_block(
            top, total, main, rest, query_main, query_rest, key, value, start, size, scale, MAIN, REST, DIM, KEYS, WHOLE
        )
    output = attended + (picture * patches + begin) * (HEADS * DIM) + head * DIM
    _write(output, rows, size, main / total[:, None], 0, MAIN, HEADS, DIM)
    if REST > 0:
        _write(output, rows, size, rest / total[:, None], MAIN, REST, HEADS, DIM)


@triton.jit
def _attend_to_block(
    top, total, main, rest, query_main, query_rest, key, value, start, size, scale,
    MAIN: tl.constexpr, REST: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, IN_RANGE: tl.constexpr,
):  # fmt: skip
    """Update each row's largest score, sum of weights and weighted sum of values with the next block of keys."""
    keys = start + tl.arange(0, KEYS)
    key_main = _read(key, keys, size, 0, MAIN, DIM, IN_RANGE)
    scores = tl.dot(query_main, tl.trans(key_main), input_precision="ieee")  # [ROWS, KEYS]
    if REST > 0:
        key_rest = _read(key, keys, size, MAIN, REST, DIM, IN_RANGE)
        scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
    if not IN_RANGE:
        scores = tl.where((keys < size)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shrink = tl.exp2(top - new_top)
    likely = tl.exp2(scores * scale - new_top[:, None])
    total = total * shrink + tl.sum(likely, 1)
    weights = likely.to(value.dtype.element_ty)
    value_main = _read(value, keys, size, 0, MAIN, DIM, IN_RANGE)
    main = tl.dot(weights, value_main, main * shrink[:, None], input_precision="ieee")
    if REST > 0:
        value_rest = _read(value, keys, size, MAIN, REST, DIM, IN_RANGE)
        rest = tl.dot(weights, value_rest, rest * shrink[:, None], input_precision="ieee")
    return new_top, total, main, rest


@triton.jit
def _read(source, rows, size, FIRST: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, IN_RANGE: tl.constexpr):
    """Load some columns of some rows; elements out of range are 0."""
    columns = FIRST + tl.arange(0, COLUMNS)
    is_there = (columns < DIM)[None, :]
    if not IN_RANGE:
        is_there = is_there & (rows < size)[:, None]
    return tl.load(source + rows[:, None] * DIM + columns[None, :], mask=is_there, other=0.0)


@triton.jit
def _write(
    output, rows, size, numbers, FIRST: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    columns = FIRST + tl.arange(0, COLUMNS)
    is_there = (rows < size)[:, None] & (columns < DIM)[None, :]
    at = output + rows[:, None] * (HEADS * DIM) + columns[None, :]
    tl.store(at, numbers.to(output.dtype.element_ty), mask=is_there)
