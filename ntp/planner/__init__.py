"""What failures cost a cluster under each policy, and which layout loses least: simulation on one CPU.

Shard sizes and microbatches come from `ntp.plan`, so that the advice and the behaviour of a job cannot
differ. Pure and free of torch; time is in hours in a study and in seconds in a step.
"""
