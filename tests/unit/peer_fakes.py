"""Stand-ins for the libraries of other environments, as files for a PYTHONPATH.

Each says what it was asked for in `asked.jsonl` beside it, one JSON object a line.
"""

from __future__ import annotations

import json
from pathlib import Path

GENAI = """
import json
from pathlib import Path
from types import SimpleNamespace

print("a library that talks")  # must not be taken for the runner's own lines
__version__ = "1.2"
ASKED = Path(__file__).with_name("asked.jsonl")


class SchedulerConfig:
    pass


class GenerationConfig:
    pass


class AggregationMode:
    SUM, NORM_SUM = "sum", "norm_sum"


class GenerationStatus:
    RUNNING, FINISHED, IGNORED = range(3)


def CacheEvictionConfig(*args):
    return list(args)


class Handle:
    def __init__(self, ids, num):
        self.left, self.unread = num, 0
        self.is_ignored = len(ids) > 500

    def can_read(self):
        return self.unread > 0

    def read(self):
        self.unread -= 1
        return {0: SimpleNamespace(generated_ids=[7])}

    def get_status(self):
        return GenerationStatus.IGNORED if self.is_ignored else int(self.left == 0)


class ContinuousBatchingPipeline:
    def __init__(self, folder, scheduler, device, properties):
        with ASKED.open("a") as file:
            asked = {"folder": folder, "device": device, "properties": properties}
            file.write(json.dumps(asked | vars(scheduler)) + "\\n")
        self.handles = []

    def add_request(self, request_id, tensor, config):
        assert config.ignore_eos and not config.do_sample and tensor.shape[0] == 1
        if tensor[0][0] == 99:
            raise ValueError("the first token\\nis 99")
        if tensor[0][0] == 9:
            import os
            os.kill(os.getpid(), 9)
        self.handles.append(Handle(tensor[0], config.max_new_tokens))
        return self.handles[-1]

    def step(self):
        for handle in self.handles:
            if handle.left and not handle.is_ignored:
                handle.left, handle.unread = handle.left - 1, handle.unread + 1

    def get_metrics(self):
        running = sum(h.left > 0 for h in self.handles)
        return SimpleNamespace(cache_usage=25.0 * running)
"""

OPTIMUM = """
import os, sys
from pathlib import Path

folder = Path(sys.argv[-1])
with Path(__file__).parents[2].joinpath("exports").open("a") as file:
    file.write(os.environ.get("HF_HUB_OFFLINE", "") + " ".join(sys.argv[1:-1]) + "\\n")
if "unknown" in sys.argv[sys.argv.index("--model") + 1]:
    sys.exit("an older line\\nKeyError: no such architecture")
folder.mkdir()
folder.joinpath("openvino_model.xml").write_text("<net/>")
"""


def write_openvino(folder: Path, *, has_optimum: bool = True) -> None:
    """Write openvino, openvino_genai and, unless told otherwise, optimum-intel."""
    folder.mkdir(exist_ok=True)
    (folder / "openvino_genai.py").write_text(GENAI)
    (folder / "openvino.py").write_text("def Tensor(array):\n    return array\n")
    optimum = folder / "optimum"
    (optimum / "commands").mkdir(parents=True, exist_ok=True)
    if has_optimum:
        (optimum / "intel").mkdir(exist_ok=True)
    for package in (optimum, *(p for p in optimum.iterdir() if p.is_dir())):
        (package / "__init__.py").write_text("")
    (optimum / "commands" / "optimum_cli.py").write_text(OPTIMUM)


def asked(folder: Path) -> list[dict]:
    """What pipelines were made with, in order."""
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]
