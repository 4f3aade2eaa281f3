"""What vToken decides in every step of a scheduler; `step.py` shows the step.

numpy only: what is needed of vLLM is said in `ports.py`, and `vtoken.vllm_plugin` provides it.
"""
