"""Training of large language models on a mesh that loses GPUs, with weights that do not depend on the mesh.

For a job, use `ntp-launch` (README.md). For a training loop or a model of your own:

    ntp.plan        make_plan, plan_units: who owns which units, who computes which microbatches
    ntp.parameters  ParameterSpec, Part: how a parameter is cut into units
    ntp.layers      the parallel layers, refresh_scales
    ntp.trainer     make_weights, wrap: the NonuniformTP wrappers that fit a plan; Trainer: the job's loop
    ntp.evidence    state_hashes
    ntp.testing     simulate: a mesh with failures in the threads of one process

`tests/example_library.py` puts them together. How it works is in DESIGN.md. Importing `ntp` loads nothing:
configuration, plan and planner need no torch.
"""
