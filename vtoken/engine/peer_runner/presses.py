"""Hugging Face with a press of kvpress."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import MISSING, fields, is_dataclass

from .base import Refused


class KvPress:
    """Hugging Face with a press: prompts are compressed after their prefill.

    Batches are static: consecutive requests whose prompts are of one length, up to
    `concurrency`; the next ones start when the longest has ended. (kvpress's own pipeline takes
    one prompt at a time; its presses compress each row of a batch for itself.) Memory is not
    limited. With `decode_interval` the press also runs every so many output tokens.
    """

    module, args = "kvpress", ("press", "dtype", "decode_interval")

    def __init__(self, settings: dict) -> None:
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.settings = torch, settings
        self.press, name = _press(kvpress, settings), settings["press"]
        self.decoding, eviction = None, f"{name}, prompts only"
        if interval := settings.get("decode_interval"):
            self.decoding = kvpress.DecodingPress(
                base_press=self.press, compression_interval=interval,
                target_size=settings["budget_tokens"], hidden_states_buffer_size=interval,
            )  # fmt: skip
            eviction = f"{name}, also every {interval} output tokens"
        self.model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"])
        ).eval()
        self.about = {"version": _version("kvpress"), "eviction": eviction}
        self.about["budget_tokens"] = settings["budget_tokens"]

    def run(self, requests: list, concurrency: int, clock) -> tuple[list, dict]:
        start, times = clock(), []
        evicted = peak = most = 0
        for batch in same_length_batches(requests, concurrency):
            found, num_evicted, num_slots = self._run_batch(batch, lambda: clock() - start)
            times += found
            evicted, peak = evicted + num_evicted, max(peak, num_slots)
            most = max(most, len(batch))
        values = {"concurrency": most, "peak_pool_tokens": peak, "evicted_tokens": evicted}
        return times, values

    def _run_batch(self, batch: list, now) -> tuple[list, int, int]:
        """Times, tokens evicted of all requests, and the most slots that were taken."""
        from transformers import DynamicCache

        torch, cache, device = self.torch, DynamicCache(), self.model.device
        prompt_len, longest = len(batch[0][0]), max(num for _, num in batch)
        times: list = [[now(), []] for _ in batch]
        self.press.compression_ratio = self._prompt_ratio(prompt_len)
        with torch.inference_mode():
            tokens = torch.tensor([ids for ids, _ in batch], device=device)
            with self.press(self.model):
                out = self.model(input_ids=tokens, past_key_values=cache, logits_to_keep=1)
            peak = cache.get_seq_length()
            with self.decoding(self.model) if self.decoding else nullcontext():
                for step in range(longest):
                    token = out.logits[:, -1:].argmax(-1)
                    for (_, num), (_, tokens_s) in zip(batch, times, strict=True):
                        if step < num:
                            tokens_s.append(now())
                    if step + 1 == longest:
                        break
                    # Positions go on from the whole prompt: keys keep theirs when others go.
                    position = torch.full((len(batch), 1), prompt_len + step, device=device)
                    out = self.model(input_ids=token, past_key_values=cache, position_ids=position)
                    peak = max(peak, cache.get_seq_length())
        num_evicted = prompt_len + longest - 1 - cache.get_seq_length()
        return times, num_evicted * len(batch), peak * len(batch)

    def _prompt_ratio(self, prompt_len: int) -> float:
        ratio = self.settings.get("eviction_ratio")
        if ratio is None:  # presses keep int(length x (1 - ratio)): half a token against rounding
            ratio = max(0.0, 1 - (self.settings["budget_tokens"] + 0.5) / prompt_len)
        return ratio


def same_length_batches(requests: list, most: int):
    """Lists of up to `most` consecutive requests whose prompts are equally long."""
    batch: list = []
    for request in requests:
        if batch and (len(batch) == most or len(batch[0][0]) != len(request[0])):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _press(kvpress, settings: dict):
    """The press by its name.

    Raises:
        Refused: there is none, or it needs more than a ratio.
    """
    names = sorted(name for name, kind in vars(kvpress).items() if _takes_a_ratio(kind))
    if settings["press"] not in names:
        raise Refused(
            f"--peer-args {settings['peer']}.press", settings["press"], "one of " + ", ".join(names)
        )
    return getattr(kvpress, settings["press"])(compression_ratio=0.0)


def _takes_a_ratio(kind: object) -> bool:
    if not (isinstance(kind, type) and is_dataclass(kind) and kind.__name__.endswith("Press")):
        return False
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return "compression_ratio" in {f.name for f in fields(kind)} and (
        set(needed) <= {"compression_ratio"}
    )


def _version(package: str) -> str:
    from importlib.metadata import version

    return f"{package} {version(package)}"
