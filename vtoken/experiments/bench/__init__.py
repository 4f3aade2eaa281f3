"""`vtoken bench`: the paper's evaluation as paired runs.

    result = run_bench(BenchSettings(suites=("memory",)))

Files:
    bench_options.py    what is asked, checked without an engine
    open_engines.py     several engines open at once, so that modes can take turns
    named_workloads.py  requests by name or file, with prompts of their own in every repeat
    measure.py          one run -> one flat record
    pairing.py          A B A B over repeats; decisions recorded by naive and replayed
    journal.py          runs measured already, for --resume
    layouts.py          live tokens per block, and what chance alone would leave there
    rows.py             records -> rows: medians, least and most, ratios of pairs
    suites/             the suites; run.py runs them one after the other
    advice.py, show.py, suite_plots.py, output_files.py    what the rows say
    paired_outputs.py   texts of naive and vtoken side by side, for `vtoken verify`
"""
