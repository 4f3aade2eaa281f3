"""`vtoken serve --hash-kv-every N` under load, its scheduler and worker in processes of their own."""

from __future__ import annotations

import json
import os

import pytest

from vtoken.server.load import run_load

pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OPTIONS = (
    "--policy", "h2o", "--kv-budget-tokens", "64", "--evict-when", "always", "--num-kv-blocks",
    "60", "--block-size", "32", "--max-model-len", "512", "--eviction-interval", "4",
    "--hash-kv-every", "2",
)  # fmt: skip
# vLLM's worker in a process of its own, and the engine's core in another.
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

# Loads with vLLM's plugins in every process; from the 20th copy on, one token is left behind.
FAULT = """
def register():
    from vtoken.vllm_plugin.cpu_attention import CPUAttention

    move, calls = CPUAttention.move, []

    def skipping(self, source, destination):
        calls.append(1)
        last = len(source) - (len(calls) >= 20)
        return move(self, source[:last], destination[:last])

    if not getattr(move, "skips", False):  # plugins may load twice in a process
        skipping.skips = True
        CPUAttention.move = skipping
"""


def start(folder, **env):
    from server_process import Server

    # The last flag wins over the helper's: workers apart from the engine's core.
    vllm = ("--distributed-executor-backend", "mp")
    return Server(folder / "server.log", *OPTIONS, vllm=vllm, **APART, **env)


def install_fault(folder) -> str:
    """A package in `folder` with a vLLM plugin; returns the folder for PYTHONPATH."""
    (folder / "broken_moves.py").write_text(FAULT)
    info = folder / "broken_moves-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-moves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbroken_moves = broken_moves:register\n"
    )
    return str(folder)


def test_load_is_checked_and_nothing_is_violated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = start(tmp_path)
    try:
        server.wait_until_up()
        report = run_load(server.url, model="tiny-llama", clients=8, seconds=60.0, max_tokens=120)
        state = server.wait_idle()
        names = [child.title for child in server_children(server)]
    finally:
        code = server.stop()
    assert report.failed == [] and report.completed >= 8 and code == 0
    rows = {row["name"]: row for row in state["checks"]}
    print("\n" + ", ".join(f"{name} {row['events']:,}" for name, row in rows.items()))
    assert all(row["violations"] == 0 for row in rows.values())
    # I1 and scores are the worker's, I4 the scheduler's; every second event is looked at.
    assert rows["I1"]["events"] == rows["I4"]["events"] >= 20 and rows["positions"]["events"] > 500
    assert rows["I1"]["events"] <= state["counters"]["relocation_events"] // 2 + 1
    assert not list(tmp_path.glob("vtoken-violation-*.json"))
    assert any("EngineCore" in name for name in names), names


class _Child:
    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            self.title = file.read().decode(errors="replace").replace("\0", " ")


def server_children(server) -> list[_Child]:
    return [_Child(pid) for pid in server.children()]


def test_a_fault_is_reported_and_stops_the_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    path = os.pathsep.join(filter(None, [install_fault(site), os.environ.get("PYTHONPATH")]))
    server = start(tmp_path, PYTHONPATH=path)
    try:
        server.wait_until_up()
        report = run_load(server.url, model="tiny-llama", clients=8, seconds=120.0, max_tokens=120)
        code = server.wait_exit(120.0)
        log = server.log_text()
    finally:
        server.kill()
    assert code not in (0, None), "it went on"
    assert report.failed, "the clients were told"
    reports = list(tmp_path.glob("vtoken-violation-*.json"))
    assert reports and "violated" in log
    found = json.loads(reports[0].read_text())
    assert found["invariant"] in ("I1", "I3") and found["request"] and found["replay"]["requests"]
