"""Proof, on a user's own model and machine, that relocation changes nothing.

suites.py     what `vtoken verify` runs; findings.py: what it found; show.py: tables of it
matrix.py     policies x layouts x engines; workloads.py: requests that relocate a lot
runs.py       engines with `vtoken.checks` on, run to their end or to the first violation
replay.py     a violation's report, run again
reference.py  a Hugging Face model that attends to what the engine attended to
oracle.py     what every request should hold, in dictionaries; contents.py: KV as numbers
catalogue.py  all faults that the checks must find; fault.py: what one is, where it is put in
"""
