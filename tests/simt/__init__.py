"""Metal kernels on an NVIDIA GPU: another machine whose 32 lanes go together. README.md says what for."""
