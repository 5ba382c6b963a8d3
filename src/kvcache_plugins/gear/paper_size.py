"""The arithmetic behind the column "KV size" of the GEAR paper.

`GEARCache.memory()` sums what is stored; this module reproduces what was published, which counts less: the buffer is
added on top of the compressed tokens, low-rank factors are counted at half their size, and outliers without indices at
4 bits.
"""


def paper_kv_percent(
    *,
    nbits: int,
    backbone: str,
    rank: int,
    sparsity: float,
    residual_length: int,
    num_tokens: int,
    head_dim: int = 128,
    num_channels: int = 4096,
    q_group_size: int = 64,
) -> float:
    """
    Size of a compressed cache as a percentage of the 16-bit cache, as the paper counts it.

    Args:
        nbits (`int`): bits a code.
        backbone (`str`): `"kcvt"`, `"kivi"` or `"per-token"`.
        rank (`int`): rank of the low-rank correction, 0 for none.
        sparsity (`float`): share of the values kept as outliers.
        residual_length (`int`): tokens of the exact buffer.
        num_tokens (`int`): tokens of the sequence.
        head_dim (`int`, *optional*, defaults to 128): channels of a head.
        num_channels (`int`, *optional*, defaults to 4096): channels of all key/value heads together.
        q_group_size (`int`, *optional*, defaults to 64): values that share a scale in the grouped backbones.

    Returns:
        `float`: per cent.
    """
    codes = nbits / 16
    scales = 1 / num_tokens + 1 / num_channels if backbone == "kcvt" else 2 / q_group_size
    buffer = residual_length / num_tokens
    low_rank = rank / 2 * (1 / head_dim + 1 / num_tokens)
    # At 2 bits an index of 16 bits is counted with each value, at 4 bits none
    outliers = sparsity * (2 if nbits < 4 else 1)
    return 100 * (codes + scales + buffer + low_rank + outliers)
