"""The launcher: from one command line to the processes of a training job.

Reading order: `cli` (what a user types), `flags` (torchrun's options), `placement` (which node runs which
ranks), `outcome` (why a job ended): pure; `processes` and `agent` act. Only `agent` imports torch, and `cli`
imports it only when something is to be started.
"""
