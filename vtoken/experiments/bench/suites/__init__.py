"""The suites of `vtoken bench`, a module each: `run_NAME`, `sentences`, `PAPER`."""

SUITES = ("memory", "sla", "sensitivity", "prefix", "quality", "peers", "elastic", "sharing")
"""All suites, in the order in which they run."""

BY_NAME_ONLY = ("peers", "elastic", "sharing")
"""What `all` leaves out; `peers` is part of it where one is given."""

NEEDS_TIMES = ("sla", "quality", "peers", "elastic")
"""What a dry run cannot answer."""
