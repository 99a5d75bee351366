"""Flags and saved keys that are gone, and what to do instead."""

_DECODER = "leave it out; every model is a decoder (docs/examples/convolution.py cuts convolutions)"
REMOVED: dict[str, str] = {
    "--model": _DECODER,
    "--channels": _DECODER,
    "--classes": _DECODER,
    "--image-shape": _DECODER,
    "--stem-stride": _DECODER,
    "--blas-arch": "set the environment variable OPENBLAS_CORETYPE",
}
# A saved key at this value is skipped; ...: at any value.
CONSTANT: dict[str, object] = {"model": "decoder", "blas_arch": ...}
