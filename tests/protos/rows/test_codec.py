"""The row codec: exact round trips, its size, and detection of every changed bit."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import Corrupt
from protos.rows.codec import (
    HEADER_BYTES,
    MAX_18_BIT_ID,
    VERSION,
    RowBlock,
    compress_rows,
    concatenate,
    decode_rows,
    encode_rows,
    expand_rows,
    is_compressed,
    max_encoded_bytes,
)

MAX_BYTES = 1 << 20  # of the blocks of these tests


def make_block(
    n: int,
    k: int,
    *,
    top_id: int = 1000,
    ids: bool = True,
    samples: int = 0,
    draws: int = 0,
    seed: int = 0,
) -> RowBlock:
    rng = np.random.default_rng(seed)
    sample_ids = rng.integers(0, top_id + 1, (n, samples)).astype(np.int32)
    return RowBlock(
        head_ids=rng.integers(0, top_id + 1, (n, k)).astype(np.int32) if ids else None,
        head_logprobs=-rng.exponential(4, (n, k)).astype(np.float32),
        tail_logmass=-rng.exponential(4, n).astype(np.float32),
        token_logprobs=-rng.exponential(4, n).astype(np.float32),
        tail_sample_ids=sample_ids if samples else None,
        tail_sample_logprob=-rng.exponential(4, n).astype(np.float32) if samples else None,
        draw_logprobs=-rng.exponential(9, (n, draws)).astype(np.float32) if draws else None,
    )


def assert_same(actual: RowBlock, expected: RowBlock, *, f32: bool) -> None:
    for name in ("head_ids", "tail_sample_ids", "tail_sample_logprob"):
        column = getattr(expected, name)
        assert (getattr(actual, name) is None) == (column is None)
        np.testing.assert_array_equal(getattr(actual, name), column)
    for name in ("head_logprobs", "draw_logprobs"):
        column = getattr(expected, name)
        assert (getattr(actual, name) is None) == (column is None)
        if column is not None:
            logprobs = column.astype(np.float32 if f32 else np.float16)
            np.testing.assert_array_equal(getattr(actual, name), logprobs)
            assert getattr(actual, name).dtype == logprobs.dtype
    np.testing.assert_array_equal(actual.tail_logmass, expected.tail_logmass)
    np.testing.assert_array_equal(actual.token_logprobs, expected.token_logprobs)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    n=st.integers(0, 9),
    k=st.integers(0, 9),
    top_id=st.sampled_from([0, 3, 65_535, 65_536, MAX_18_BIT_ID, MAX_18_BIT_ID + 1, 2**31 - 1]),
    ids=st.booleans(),
    f32=st.booleans(),
    samples=st.integers(0, 5),
    draws=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_round_trip(
    n: int, k: int, top_id: int, ids: bool, f32: bool, samples: int, draws: bool, seed: int
) -> None:
    """`draws`: the block has draws of the student in place of samples of the teacher."""
    m, samples = (samples, 0) if draws else (0, samples)
    block = make_block(n, k, top_id=top_id, ids=ids, samples=samples, draws=m, seed=seed)
    encoded = encode_rows(block, f32=f32)
    max_bytes = max_encoded_bytes(n, k, samples or m)
    assert len(encoded) <= max_bytes
    compressed = compress_rows(encoded)
    for data in (encoded, compressed):
        decoded = decode_rows(data, MAX_BYTES)
        assert (len(decoded), decoded.k) == (n, k)
        assert (decoded.tail_samples, decoded.tail_draws) == (samples, m)
        assert_same(decoded, block, f32=f32)
        assert expand_rows(data, max_bytes) == encoded
        assert compress_rows(data) == compressed


def test_minus_infinity_survives() -> None:
    block = make_block(3, 2)
    block.tail_logmass[:] = -np.inf
    block.head_logprobs[0, 0] = -np.inf
    block.head_logprobs[1, 1] = -1e30
    decoded = decode_rows(encode_rows(block), MAX_BYTES)
    assert np.isneginf(decoded.tail_logmass).all()
    assert np.isneginf(decoded.head_logprobs[0, 0])
    assert np.isneginf(decoded.head_logprobs[1, 1])


@pytest.mark.parametrize(
    ("k", "samples", "bytes_a_token"), [(64, 0, 280), (64, 4, 293), (0, 12, 39), (0, 1, 14.25)]
)
def test_size(k: int, samples: int, bytes_a_token: float) -> None:
    n = 1000
    data = encode_rows(make_block(n, k, top_id=MAX_18_BIT_ID, samples=samples))
    print(f"k = {k}, M = {samples}: {len(data) / n:.2f} bytes a token")
    assert len(data) == bytes_a_token * n + HEADER_BYTES


def test_rows_from_before_there_were_samples_are_read() -> None:
    """One hand-written row with the ids 1 and 65,537."""
    payload = struct.pack("<2HB2e2f", 1, 1, 0b0100, -0.5, -1.5, -2.0, -0.5)
    prefix = struct.pack("<4sBBHII", b"DRow", 1, 1, 0, 2, 1)
    block = decode_rows(prefix + xxhash.xxh3_128_digest(prefix + payload) + payload, MAX_BYTES)
    assert block.head_ids is not None
    assert block.head_ids.tolist() == [[1, 65_537]]
    assert block.head_logprobs.tolist() == [[-0.5, -1.5]]
    assert (block.tail_logmass.tolist(), block.token_logprobs.tolist()) == ([-2.0], [-0.5])
    assert block.tail_sample_ids is None
    assert block.tail_sample_logprob is None


def test_draws_cost_two_bytes_each_and_have_a_version_of_their_own() -> None:
    """An older program reports an unknown version; blocks without draws keep version 1."""
    block = make_block(1000, 8, ids=False, draws=16)
    data = encode_rows(block)
    assert len(data) == 1000 * (2 * (8 + 16) + 8) + HEADER_BYTES
    assert data[4] == 2
    block_without_draws = make_block(1000, 8, ids=False)
    assert encode_rows(block_without_draws)[4] == VERSION == 1
    for version in (1, 3):
        with pytest.raises(Corrupt, match=rf"codec version {version}; this program reads"):
            decode_rows(data[:4] + bytes([version]) + data[5:], MAX_BYTES)
    with pytest.raises(Corrupt, match="codec version 2"):
        decode_rows(b"DRow\2" + encode_rows(block_without_draws)[5:], MAX_BYTES)


def test_samples_and_draws_in_one_block_are_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        encode_rows(make_block(2, 2, samples=1, draws=1))


def test_negative_ids_are_refused() -> None:
    block = make_block(1, 2)
    assert block.head_ids is not None
    block.head_ids[0, 1] = -1
    with pytest.raises(ValueError, match="negative"):
        encode_rows(block)
    block = make_block(1, 2, samples=3)
    assert block.tail_sample_ids is not None
    block.tail_sample_ids[0, 2] = -1
    with pytest.raises(ValueError, match="negative"):
        encode_rows(block)


def make_sorted_block(n: int, k: int) -> RowBlock:
    """Rows as a model makes them: sorted log-probs, and only 256 different ids."""
    block = make_block(n, k, top_id=255)
    block.head_logprobs[:] = -np.sort(-block.head_logprobs, axis=1)
    return block


@pytest.mark.parametrize("k", [5, 64])
@pytest.mark.parametrize("f32", [False, True])
def test_compression_keeps_every_bit_in_fewer_bytes(k: int, f32: bool) -> None:
    encoded = encode_rows(make_sorted_block(100, k), f32=f32)
    compressed = compress_rows(encoded)
    assert len(compressed) < 0.8 * len(encoded)
    assert expand_rows(compressed, len(encoded)) == encoded
    assert encode_rows(decode_rows(compressed, MAX_BYTES), f32=f32) == encoded


def test_rows_that_expand_to_too_much_are_refused() -> None:
    encoded = encode_rows(make_sorted_block(100, 8))
    compressed = compress_rows(encoded)
    assert is_compressed(compressed)
    assert not is_compressed(encoded)
    assert expand_rows(encoded, 0) is encoded
    with pytest.raises(Corrupt, match="more than"):
        expand_rows(compressed, len(encoded) - 1)


def test_a_frame_that_promises_too_much_takes_no_memory() -> None:
    """A frame with a valid digest must not make the decoder allocate its claimed size."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    prefix = struct.pack("<4sBBHII", b"DRow", VERSION, 1 | 8, 0, 8, 4)
    data = prefix + xxhash.xxh3_128_digest(prefix + bomb) + bomb
    with pytest.raises(Corrupt, match="does not expand to"):
        decode_rows(data, MAX_BYTES)


def test_rows_are_not_expanded_beyond_the_bound() -> None:
    """1 GB of zeros, compressed to some kB, with a digest, a size and a header that agree."""
    rows, k = 1 << 17, 4096
    header = struct.pack("<4sBBHII", b"DRow", VERSION, 8, 0, k, rows)
    compressor = zstandard.ZstdCompressor().compressobj(size=rows * (2 * k + 8))
    piece = bytes(1 << 24)
    frame = b"".join(compressor.compress(piece) for _ in range(rows * 2 * k >> 24))
    frame += compressor.compress(bytes(8 * rows)) + compressor.flush()
    data = header + xxhash.xxh3_128_digest(header + frame) + frame
    tracemalloc.start()
    with pytest.raises(Corrupt, match="takes more than"):
        decode_rows(data, max_encoded_bytes(rows // 8, k))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "data",
    [
        encode_rows(make_block(3, 5)),
        encode_rows(make_block(3, 5), f32=True),
        encode_rows(make_block(3, 5, ids=False)),
        encode_rows(make_block(3, 0, samples=4)),
        encode_rows(make_block(3, 2, ids=False, samples=3, top_id=2**31 - 1)),
        encode_rows(make_block(3, 2, ids=False, draws=3)),
        compress_rows(encode_rows(make_sorted_block(30, 4))),
    ],
    ids=["f16", "f32", "no ids", "samples only", "wide samples", "draws", "zstd"],
)
def test_every_flipped_bit_is_seen(data: bytes) -> None:
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_rows(bytes(flipped), MAX_BYTES)


@pytest.mark.parametrize("zstd", [False, True])
def test_every_truncation_and_extension_is_seen(zstd: bool) -> None:
    sampled = encode_rows(make_block(3, 5, samples=2))
    data = compress_rows(encode_rows(make_sorted_block(30, 4))) if zstd else sampled
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            decode_rows(data[:length], MAX_BYTES)
    with pytest.raises(Corrupt):
        decode_rows(data + b"\0", MAX_BYTES)


@pytest.mark.parametrize(("samples", "draws"), [(0, 0), (3, 0), (0, 3)])
def test_slices_put_together_are_the_whole(samples: int, draws: int) -> None:
    block = decode_rows(encode_rows(make_block(10, 4, samples=samples, draws=draws)), MAX_BYTES)
    slices = [
        decode_rows(encode_rows(block.slice(a, b)), MAX_BYTES) for a, b in ((0, 3), (3, 4), (4, 10))
    ]
    assert encode_rows(concatenate(slices)) == encode_rows(block)
