"""Triton kernels: the functions of ``reference``, the same names and bits, and the GEMMs of ``reference_matmul``.

One file per family; ``numerics`` holds the device arithmetic that they share, ``launch`` what every launcher needs.
Rounding is done in arithmetic and integer bits, never with a float8 type, so that one source is exact in Triton's
interpreter, on sm_80 (which has no fp8), sm_90, sm_100 and sm_120. Arguments are checked in ``ops``.
"""
