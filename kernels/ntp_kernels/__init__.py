"""Kernels whose bits do not depend on how many units of a sharded dimension a call has.

They know tensors, never ranks: what a result must be combined with (MAX or integer SUM over ranks) is the
caller's business and stated in each contract. The public operations are in `dispatch`; this package exports
none of them, because the modules of the Triton kernels (`attention`, `swiglu`, ...) carry the same names.
`reference` holds the torch twins, which are the CPU path and the specification.
"""
