"""vToken: token-level virtualisation of the KV cache, as a plugin for stock vLLM."""

__version__ = "0.1.0"
