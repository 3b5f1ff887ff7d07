"""Checkpoints: the state of a run after a step, in logical coordinates, on a file system that hosts share.

A checkpoint is a folder `step-00000005`. It holds float32 masters and both moments as tensors
`NAME.master`, `NAME.exp_avg`, `NAME.exp_avg_sq` of shape `[units, elements of a unit]`, cut into *pieces*
(a range of units x a range of elements) that depend on who saved them and mean the same to everyone; and
`manifest.json`, which says where each piece lies, its checksum, the step, the configuration and the version
of the numerics. No mesh is recorded, and the step is the position in the data.

The files are those of torch.distributed.checkpoint's safetensors storage: `HuggingFaceStorageReader` and
`torch.distributed.checkpoint.load` read a checkpoint as it stands. Writing and reading are done here because
the writer there copies a whole file in memory before it writes it (a rank of an 8B model has 24 GB), its
`.metadata` is a pickle, neither format has checksums, and its collectives pickle through one coordinator and
know no other mesh than processes.

Reading order: `manifest` (what is known of a checkpoint), `store` (folders and their atomic publication),
both without torch; `pieces` (tensors to files and back), `staging` (from the device to host memory), `save`
(behind the training steps), `load` (the choice of a checkpoint by all ranks), `session` (what a worker
calls).

What was left out: copies on several file systems, and compression.
"""
