"""CRC-32C of many strings is that of each, as a loop over bits has it."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from shard_files import slow_crc32c

from dali_pipes.storage.crc32c import crc32c, crc32c_of_short


@given(st.lists(st.one_of(st.binary(max_size=9), st.binary(max_size=400)), max_size=8))
@example([b"\0" * length for length in (0, 1, 2, 3, 4, 63, 64, 65, 128, 129, 4096)])
def test_it_is_that_of_each_string(strings: list[bytes]) -> None:
    found = crc32c(strings)
    assert found.dtype == np.uint32
    assert found.tolist() == [slow_crc32c(string) for string in strings]
    assert found.tolist() == [crc32c_of_short(string) for string in strings]


def test_published_values() -> None:
    """RFC 3720, appendix B.4."""
    strings = [bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1)), b"123456789"]
    assert crc32c(strings).tolist() == [0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0xE3069283]


def test_more_lanes_than_a_block_has() -> None:
    data = np.random.default_rng(0).integers(0, 256, 300_001, np.uint8).tobytes()
    assert crc32c([data[:70_000], memoryview(data)]).tolist() == [slow_crc32c(data[:70_000]), slow_crc32c(data)]
