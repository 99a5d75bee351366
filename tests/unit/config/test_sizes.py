"""Bytes as people type them, in every flag and key that takes bytes."""

import pytest

from mpipar.config import flags, reading
from mpipar.config.sizes import read_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        (" 4k", 4096),
        ("64KiB", 65536),
        ("1.5M", 3 << 19),
        ("1g", 1 << 30),
        ("2TB", 2 << 40),
        ("0", 0),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text, expected):
    assert read_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "K", "4Q", "x", "-1", "1.5", "1.5B", "1e6", "4 K", "\u0664K", "4i", "1..5M"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"^must be bytes: write 4096, 64K, 1\.5M or 1G$"):
        read_bytes(text)


def read(folder, text):
    """The configuration from a file and flags that have this text for both sizes."""
    parser = flags.Parser()
    flags.add_flags(parser)
    (folder / "sizes.toml").write_text(f'memory-limit = "{text}"\n')
    words = ["--config", str(folder / "sizes.toml"), "--bucket-bytes", text]
    return reading.read(*flags.parsed(parser, words))


def test_flags_and_keys_take_sizes(tmp_path):
    found = read(tmp_path, "1.5M")
    assert found.problems == ()
    assert (found.config.train.bucket_bytes, found.config.run.memory_limit) == (3 << 19, 3 << 19)
    assert "memory-limit = 1572864\n" in reading.to_toml(found.config)
    assert [one.split(":")[0] for one in read(tmp_path, "1.5").problems] == [
        f"--memory-limit = '1.5' in {tmp_path}/sizes.toml",
        "--bucket-bytes 1.5",
    ]
