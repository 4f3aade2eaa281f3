"""What is not here, by arithmetic and vLLM's real scheduler: devices, models, traces, fleets.

devices, model_shapes, find_model    the memory of a device, and what a model takes of it
cost_model, modelled_clock           seconds that a step would have taken
series, search, dry_engines          what is tried, in which order, on which engines
replicas, trace_replay, approximate_replica, fleet    a trace on one server or many
"""
