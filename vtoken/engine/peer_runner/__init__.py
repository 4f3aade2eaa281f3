"""Runs requests on an engine that is not ours; started in another environment by
`vtoken.experiments.bench.suites.peers`.

    python peer_runner/__main__.py stock|openvino|openvino-eviction|kvpress SETTINGS_JSON

Needs nothing of vToken, hence the relative imports: it is the package `peer_runner` over there.
Each engine imports its own library when it is made. What it says goes to stdout, a word and JSON
a line; libraries that print have stderr instead:

    READY {about}                      up; about: version, pool_tokens, budget_tokens, eviction
    REFUSED {option, value, allowed}   a setting is wrong, and it ends
    FAILED "why"                       the engine failed, and it ends
    DONE                               a job's result is in its file

One job a line on stdin: {"requests": [[ids, num], ...], "concurrency", "result"}. The file
`result` gets {"times": [[submitted_s, [token_s, ...]], ...], "wall_s", "values"}; times in the
order of requests, values as flat fields of a row. Ends at the end of stdin.
"""

from __future__ import annotations

READY, REFUSED, FAILED, DONE = (f"vtoken-peer-{w}" for w in ("ready", "refused", "failed", "done"))
