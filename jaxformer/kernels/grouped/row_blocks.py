"""What the implementations in tiles of fixed sizes share: how many rows a block has, and which widths do."""


def block_rows(rows: int, groups: int, smallest: int) -> int:
    """Rows of a block for so many rows in all, where every group begins a new one: a power of two from `smallest` to
    128, so small that few are empty.

    >>> block_rows(4096, 8, smallest=8), block_rows(2, 8, smallest=8), block_rows(32768, 64, smallest=16)
    (128, 8, 128)
    """
    share = max(rows // (4 * groups), 1)
    return min(max(1 << (share.bit_length() - 1), smallest), 128)


def unsupported(tile: int, width: int, out: int, dtype: str) -> str | None:
    """Why kernels whose tiles are so wide cannot multiply [rows, width] with [width, out]; None: they can.

    >>> unsupported(128, 1024, 4096, "bfloat16") is None, unsupported(128, 1024, 4096, "float64")
    (True, 'float64')
    >>> unsupported(128, 1024, 100, "float32")
    'weights 100 wide (multiples of 128)'
    """
    if dtype == "float64":
        return "float64"
    wrong = next((size for size in (width, out) if size % tile), None)
    return None if wrong is None else f"weights {wrong} wide (multiples of {tile})"
