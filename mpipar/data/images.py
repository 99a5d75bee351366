"""Images with their classes: scikit-learn's handwritten digits, or the arrays of an .npz file.

The images of a step are chosen as rows of text are: see `mpipar.data.rows`. Letters: N images, B
images of a microbatch, H height, W width, C channels.
"""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from dataclasses import dataclass

import numpy as np

from mpipar.data import rows
from mpipar.errors import DataError
from mpipar.files.bounded import open_regular

HELD_OUT = 5  # one image in five is held out
# What NumPy and the zip reader raise for a damaged file, or one of another kind. RuntimeError: it
# is encrypted or of another version. zlib's: compressed arrays. TokenError: an array's header.
DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    MemoryError,
    OverflowError,
    LookupError,
    struct.error,
)
MOST_BYTES = 2 << 30  # of an .npz file's arrays


@dataclass(frozen=True)
class ImageSet:
    """Images (N, H, W, C), scaled to mean 0 and deviation 1 over the training part; labels (N,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.labels)


@dataclass(frozen=True)
class Batch:
    """One microbatch: images (B, H, W, C) and targets (B,), their classes.

    targets is None if only the logits are wanted.
    """

    images: object
    targets: object

    @property
    def shape(self):
        return self.images.shape


class Rows(rows.Rows):
    """Images of one part of the set for one place in the grid; a row is one image."""

    def __init__(self, ops, part: ImageSet, config, grid):
        super().__init__(ops, part, config, grid)
        self.num_starts = len(part)

    def _batch(self, starts) -> Batch:
        images = self.part.images[starts].astype(self.ops.dtype)
        return Batch(self.ops.asarray(images), self.ops.asarray(self.part.labels[starts]))


def arrays(part: ImageSet) -> list:
    """Return the arrays of a part, for its fingerprint."""
    return [part.images, part.labels]


def blank_batch(ops, config) -> Batch:
    """Return a microbatch of zeros in its true shape. config: resolved."""
    num_rows = rows.rows_per_microbatch(config)
    images = ops.zeros((num_rows, *config.model.image_shape), label="buffers")
    return Batch(images, ops.zeros((num_rows,), "int64", label="buffers"))


def load(config, thorough: bool = True):
    """Return ((training part, held-out part), a description of them).

    thorough: ignored, all images are always checked. Raises DataError if they cannot be read, do
    not fit the model, or are fewer than a batch each.
    """
    images, labels, what = _read(config.run.data, "--data", config.model)
    if config.run.val_data:
        held_images, held_labels, held_what = _read(config.run.val_data, "--val-data", config.model)
        if not (len(images) and len(held_images)):
            raise DataError("--data and --val-data: must hold at least one image each")
        images, labels = (
            np.concatenate(both) for both in ((held_images, images), (held_labels, labels))
        )
        return _parts(images, labels, np.arange(len(images)), len(held_images)), (
            f"{what}; held out: {held_what}"
        )
    batch_size = config.train.batch_size
    held_out = max(len(images) // HELD_OUT, batch_size)
    if len(images) - held_out < batch_size:
        raise DataError(
            f"the data has {len(images):,} images, fewer than one batch to train on and one to hold"
            f" out (2 x {batch_size}): give more images, or a smaller --batch-size"
        )
    # The same order for every --seed, so that what is held out stays held out.
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(images))
    return _parts(images, labels, order, held_out), what


def evaluated(part: ImageSet, config) -> ImageSet:
    """Return what evaluations read of the held-out part: all of it."""
    return part


def _read(paths, flag: str, model):
    """Return images, classes and a description, of one file or of the digits."""
    if len(paths) > 1:
        raise DataError(f"{flag}: a convnet reads one .npz file, not {len(paths)}")
    images, labels, what = _read_npz(paths[0], flag) if paths else _digits()
    _check(images, labels, model, f"{flag} {paths[0]}" if paths else "the digits")
    return images, labels, what


def _parts(images, labels, order, held_out: int) -> list[ImageSet]:
    """Return the training part and the held-out part, which has the first images in this order.

    Both are normalized by the mean and deviation of the training part.
    """
    images, labels = images[order].astype(np.float64), labels[order].astype(np.int64)
    images -= images[held_out:].mean()
    images /= images[held_out:].std() or 1.0
    return [
        ImageSet(images[part], labels[part]) for part in (slice(held_out, None), slice(held_out))
    ]


def _digits():
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "the digits come with scikit-learn, which is not installed: pip install '.[digits]',"
            " or give your own images with --data FILE.npz (arrays x and y)"
        ) from None
    digits = load_digits()
    return (
        digits.images[..., None],
        digits.target,
        f"{len(digits.target):,} handwritten digits of scikit-learn",
    )


def _read_npz(path: str, flag: str):
    """Return x as (N, H, W, C), y, and a description."""
    try:
        with open_regular(path) as raw, np.load(raw, allow_pickle=False) as file:
            missing = [name for name in ("x", "y") if name not in file]
            if missing:
                raise DataError(
                    f"{flag} {path}: has no array {' and no array '.join(missing)} (it has"
                    f" {', '.join(file) or 'none'}); x holds images (N, H, W) or (N, H, W, C), y"
                    " their classes (N,)"
                )
            nbytes = sum(one.file_size for one in file.zip.infolist())
            if nbytes > MOST_BYTES:
                raise DataError(
                    f"{flag} {path}: its arrays take {nbytes:,} bytes; images are held"
                    f" in memory, at most {MOST_BYTES:,}"
                )
            x, y = file["x"], file["y"]
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror or error}") from None
    except DAMAGED:
        raise DataError(
            f"{flag} {path}: is not an .npz file of numeric arrays x and y, as"
            " numpy.savez(FILE, x=images, y=classes) writes it"
        ) from None
    return x[..., None] if x.ndim == 3 else x, y, f"{len(y) if y.ndim else 0:,} images of {path}"


def _check(x, y, model, where) -> None:
    """Raise DataError with every way in which x and y do not fit each other or the model."""
    if x.ndim != 4 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{where}: x has shape {x.shape} and y {y.shape}; they must be images"
            " (N, H, W) or (N, H, W, C) and equally many classes (N,)"
        )
    found = []
    if x.dtype.kind not in "fiub" or not np.isfinite(x).all():
        found.append(f"{where}: x must hold finite numbers; it is {x.dtype}")
    if x.shape[1:] != tuple(model.image_shape):
        shape = ",".join(map(str, x.shape[1:]))
        found.append(f"{where}: the images are {shape}; type --image-shape {shape}")
    if y.dtype.kind not in "iu":
        found.append(f"{where}: y must hold whole numbers, the classes; it is {y.dtype}")
    elif len(y) and (y.min() < 0 or y.max() >= model.classes):
        cure = f"type --classes {y.max() + 1} or more" if y.min() >= 0 else "count from 0"
        found.append(
            f"{where}: y has classes {y.min()} to {y.max()}, but the model has"
            f" {model.classes}, 0 to {model.classes - 1}; {cure}"
        )
    if found:
        raise DataError(found)
