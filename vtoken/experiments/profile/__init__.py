"""What the mechanism costs: the suites behind `vtoken profile`.

    overhead   hooks against stock vLLM in paired steps; time per relocation event; reclaim
               against naive
    step       where a step's time goes, phase by phase
    scale      cost against running requests and against context; metadata per token
    kernels    our kernels against the engine's own op

Phases are timed from outside (`timer`, `boundaries`): the engine's code holds no probes.
"""
