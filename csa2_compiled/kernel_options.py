"""FlexAttention's tile sizes, computed from the device's shared memory.

At a head dimension of 512 FlexAttention's defaults do not fit or crawl (146 ms instead of 3.6 ms, measured
on one H200), so the tiles are never left to it on CUDA.
"""

from dataclasses import dataclass

# (rows of q, keys, warps), widest first.
_TILES = ((128, 64, 8), (64, 64, 8), (64, 32, 8), (32, 32, 4), (32, 16, 4), (16, 16, 4))
_SCRATCH_BYTES = 2048  # row maxima and sums that cross warps


@dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes of one FlexAttention forward kernel and the shared memory they take, in bytes."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shared_bytes: int

    def as_kernel_options(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def forward_tile_bytes(block_m: int, block_n: int, head_dim: int, element_bytes: int, num_stages: int) -> int:
    """Shared memory of a forward kernel, an upper bound: q, num_stages tiles of K and of V, probabilities.

    Triton 3.6 on an H200 takes q, K and V once, also with two stages (tests/gpu/test_kernel_options_gpu.py).
    """
    q = block_m * head_dim
    keys_and_values = 2 * num_stages * block_n * head_dim
    return (q + keys_and_values + block_m * block_n) * element_bytes + _SCRATCH_BYTES


def forward_tiles(head_dim: int, element_bytes: int, shared_memory: int, query_rows: int) -> ForwardTiles:
    """The widest tiles that fit, pipelined in two stages where there is room.

    shared_memory: bytes one block may use on the device (99 KiB on consumer Ada, 163 KiB on A100, 227 KiB
    on H100 and H200). query_rows: rows of q a kernel instance has at most; wider tiles would idle.
    Raises ValueError when not even the smallest tile fits.
    """
    rows = max(16, query_rows)
    for block_m, block_n, num_warps in _TILES:
        for num_stages in (2, 1):
            used = forward_tile_bytes(block_m, block_n, head_dim, element_bytes, num_stages)
            if block_m <= rows and used <= shared_memory:
                return ForwardTiles(block_m, block_n, num_warps, num_stages, used)
    raise ValueError(
        f"head_dim {head_dim} with {element_bytes} byte elements needs "
        f"{forward_tile_bytes(16, 16, head_dim, element_bytes, 1)} bytes of shared memory a block; the device "
        f"allows {shared_memory}"
    )
