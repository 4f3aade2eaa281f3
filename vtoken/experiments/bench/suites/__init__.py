"""The suites of `vtoken bench`, a module each; see `vtoken.experiments.bench.run`."""
