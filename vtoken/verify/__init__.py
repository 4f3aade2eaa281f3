"""Proof, on a user's own model and machine, that relocation changes nothing.

    base.py        what is checked, and the tally of it
    hashing.py     one number per KV slot, over K and V of every layer
    operations.py  the recorded trace of moves, writes, zeroing and attention, and its order
    plan.py        what the scheduler tells the workers about a step that is to be checked
    report.py      a violation as a file a person can act on, and all that is needed to replay it
    workloads.py   requests that make many relocations
    runs.py        engines with checks on, run to their end or to the first violation
    faults.py      faults injected into a real engine; suites.py: what `vtoken verify` runs

The checks themselves sit beside the scheduler and the runner, in vtoken.vllm_plugin.checks.
"""
