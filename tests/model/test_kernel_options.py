"""The tile rule of FlexAttention's forward kernels, over the shared memory of three kinds of device."""

from itertools import pairwise

import pytest

from csa2_compiled.kernel_options import _TILES, ForwardTiles, forward_tile_bytes, forward_tiles

KIB = 1024
LIMITS = {"Ada": 99 * KIB, "A100": 163 * KIB, "H100 and H200": 227 * KIB}
HEAD_DIMS = (64, 128, 192, 256, 512)
ROWS = (1, 4, 16, 17, 32, 64, 100, 128)

every_device = pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
every_dtype = pytest.mark.parametrize("element_bytes", [2, 4], ids=["bf16", "fp32"])
every_width = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@every_device
@every_dtype
@every_width
def test_the_widest_tile_that_fits(head_dim: int, element_bytes: int, limit: int) -> None:
    for rows in ROWS:
        tiles = forward_tiles(head_dim, element_bytes, limit, rows)
        assert all(map(is_power_of_two, (tiles.block_m, tiles.block_n, tiles.num_warps)))
        assert 16 <= tiles.block_m <= max(16, rows)
        assert tiles.block_n >= 16  # the least that a tensor core takes
        # q, num_stages tiles of K and V, and the probabilities, all of one dtype.
        rows_held = tiles.block_m + 2 * tiles.num_stages * tiles.block_n
        held = (rows_held * head_dim + tiles.block_m * tiles.block_n) * element_bytes
        assert held < tiles.shared_bytes <= limit

        def fits(block_m: int, block_n: int, stages: int, rows: int = rows) -> bool:
            used = forward_tile_bytes(block_m, block_n, head_dim, element_bytes, stages)
            return block_m <= max(16, rows) and used <= limit

        fitting = [(m, n) for m, n, _ in _TILES if fits(m, n, 1)]
        assert (tiles.block_m, tiles.block_n) == max(fitting, key=lambda tile: tile[0] * tile[1])
        assert tiles.num_stages == (2 if fits(tiles.block_m, tiles.block_n, 2) else 1)


def test_tiles_are_listed_from_the_widest_on() -> None:
    assert all(a[0] * a[1] > b[0] * b[1] and a[0] >= b[0] and a[1] >= b[1] for a, b in pairwise(_TILES))


@every_dtype
@every_width
def test_more_memory_or_rows_never_narrow_a_tile(head_dim: int, element_bytes: int) -> None:
    def pairs(limit: int, rows: int) -> int:
        tiles = forward_tiles(head_dim, element_bytes, limit, rows)
        return tiles.block_m * tiles.block_n

    for rows in ROWS:
        by_memory = [pairs(limit, rows) for limit in LIMITS.values()]
        assert by_memory == sorted(by_memory)
    for limit in LIMITS.values():
        by_rows = [pairs(limit, rows) for rows in ROWS]
        assert by_rows == sorted(by_rows)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # Released heads: 64 rows of 512 channels in bf16.
        (227 * KIB, ForwardTiles(64, 64, 8, 1, 206848)),
        (163 * KIB, ForwardTiles(64, 32, 8, 1, 137216)),
        (99 * KIB, ForwardTiles(32, 16, 4, 2, 101376)),
    ],
)
def test_released_shape(limit: int, expected: ForwardTiles) -> None:
    assert forward_tiles(512, 2, limit, query_rows=64) == expected


def test_kernel_options_have_the_names_of_flex_attention() -> None:
    tiles = ForwardTiles(64, 32, 8, 2, 1)
    assert tiles.as_kernel_options() == {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}


@every_dtype
@every_width
def test_nothing_fits(head_dim: int, element_bytes: int) -> None:
    least = forward_tile_bytes(16, 16, head_dim, element_bytes, 1)
    tiles = forward_tiles(head_dim, element_bytes, least, query_rows=64)
    assert (tiles.block_m, tiles.block_n, tiles.num_stages, tiles.shared_bytes) == (16, 16, 1, least)
    with pytest.raises(ValueError, match=f"head_dim {head_dim} .* needs {least} bytes .* allows {least - 1}"):
        forward_tiles(head_dim, element_bytes, least - 1, query_rows=64)
