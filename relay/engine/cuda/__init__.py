"""The runner on a device: CUDA kernels, or the same through the emulator."""
