"""`vtoken bench`: the paper's evaluation as paired runs that anyone can rerun.

    bench = Bench(BenchSettings(suites=("memory",)))
    result = bench.run()

Files:
    settings.py    what is asked, checked without an engine
    session.py     engines, several of them open at once, so that modes can take turns
    workloads.py   requests by name or file, with prompts of their own in every repeat
    measure.py     one run -> one flat record
    pairing.py     A B A B over repeats; decisions recorded by naive and replayed; the journal
    layouts.py     live tokens per block, and what chance alone would leave there
    rows.py        records -> rows: medians, least and most, ratios of pairs
    memory.py, sla.py, sensitivity.py, prefix.py, quality.py, peers.py    the suites
    suites.py      which suites there are, and running them
    advice.py, show.py, report.py    what the rows say: in words, in tables, as HTML
"""
