"""Torch twins of the kernels: the CPU path, and the specification that the Triton kernels are tested against.

Legend, here and in every module of the package: M tokens of one call, D hidden size, U local units, R rows
of a unit, G query heads per KV head, H head size, B width of an FFN unit, V rows of a vocabulary unit, S
tokens of a sequence. Tensors are contiguous. Compute dtype is float32 or bfloat16; inside everything is
float32 or wider and is rounded once, at the end.

Invariant: the bits of a unit's result depend on that unit alone, not on which units are in the call. On CPU
plain torch does not give that (a GEMM's blocking follows its shape, `sigmoid` differs between the vector
body and the tail), so a sum or a transcendental over sharded data is one call per unit, of one shape, on a
contiguous copy. Only elementwise operations that IEEE rounds correctly (add, multiply, divide) are applied
to several units at once. The number of threads of torch is part of the numerics: keep it at one.
"""
