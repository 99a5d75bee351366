"""The lower tile level: CUDA kernels on one device, as sources that can be studied."""
