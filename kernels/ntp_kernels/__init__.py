"""Mesh-independent kernels: the same bits however a model is sharded. Tensors in, tensors out; never ranks."""
