"""The launcher: from one command line to the processes of a training job, and through its losses.

Reading order: `commands` (where all begin), `cli` (what a user types), `flags` (torchrun's options),
`placement` (which node runs which ranks), `events` and `coordinator` (what becomes of a job when something
happens to it), `hangs` (who holds up the others), `outcome` (why a job ended): pure. `agent`
(torch.distributed.elastic), `node`, `crew`, `processes` and, on node 0, `leader`, `lookout`, `ledger` act;
`mail` and `lease` are how they stay in touch. `cli` imports torch only when something is to be started.
"""
