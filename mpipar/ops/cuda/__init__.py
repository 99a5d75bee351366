"""The lower level of tiling: CUDA kernels on one device, as sources that can be studied."""
