"""How many requests fit at once: the parts of `vtoken capacity-scan`.

scan_options   what is asked                pools, prompts   where, and with which requests
preparation    checks before the start      engines          what runs the points
point          one point                    measuring, time_limit   real engines, in time
scan           the whole scan               scan_result, show       what it found
planned_scan   the same for a device that is not here, with modelled times
"""
