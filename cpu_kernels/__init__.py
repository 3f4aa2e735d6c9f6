"""Native CPU kernels: C++ with a plain C ABI, one object an instruction set, loaded by ctypes."""
