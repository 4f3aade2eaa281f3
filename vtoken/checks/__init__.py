"""Invariant checks that run inside an engine while it serves (config `hash_kv_every`).

    base.py            what is checked, and the tally of it
    checker.py         what both sides share: tally, report, how a run is stopped
    scheduler_side.py  a step's plan against snapshots of the tables that it changes
    worker_side.py     K/V, order, positions and scores, from books that the worker keeps itself
    plan.py            what the scheduler tells the workers about a step that is to be checked
    hashing.py         one number per KV slot, over K and V of every layer
    operations.py      the recorded trace of moves, writes, zeroing and attention, and its order
    report.py          a violation as a file a person can act on, and all that a replay needs

The plugin loads these, so nothing here knows the plugin, an engine or vLLM: a side is handed what
it reads. `vtoken.verify` runs engines with them.
"""
