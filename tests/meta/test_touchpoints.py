"""The table of touchpoints has every use of vLLM, and no more."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

pytest.importorskip("vllm")
from touchpoint_reader import Reader, declared_by_ports, find_mixins, name_of, private_names

from vtoken.vllm_plugin import compat

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("vllm_plugin", "engine", "server", "scheduling", "checks")
FILES = sorted(p for folder in FOLDERS for p in (ROOT / "vtoken" / folder).rglob("*.py"))
# Names with an underscore that are not vLLM's: of argparse, namedtuple and os.
NOT_VLLMS = {"_actions", "_asdict", "_exit"}
# The elements of what is subscripted.
ELEMENTS = {
    ("tuple", "[]"): "FullAttentionManager",
    ("MultiGroupBlockTable", "[]"): "BlockTable",
}


PORTS = "from vtoken.scheduling.ports import Block, BlockManager, Pool, Request, Scheduler\n"
SCHEDULER = "from vllm.v1.core.sched.scheduler import Scheduler\n"


def owner_name(point: compat.Touchpoint) -> str:
    return point.owner or point.module.rsplit(".", 1)[-1]


LISTED = compat.touchpoints()
OWNERS = {owner_name(p) for p in LISTED if p.kind != "import"}
TYPES = {(owner_name(p), p.name): p.signature for p in LISTED if p.signature in {*OWNERS, "tuple"}}
READER = (TYPES | ELEMENTS, find_mixins(FILES), private_names(FILES))


def key(kind: str, owner: str, name: str) -> tuple[str, str, str]:
    return kind, owner, name


def uses_of(path: Path, source: str) -> set:
    return {
        use for use in Reader(path, source, *READER).uses
        if not (use.owner == "?" and use.name in NOT_VLLMS)
    }  # fmt: skip


def listed() -> dict[tuple[str, str, str], set[str]]:
    """(kind, owner, name) -> files that may use it."""
    return {
        (p.kind, p.module if p.kind == "import" else owner_name(p), p.name): set(p.used_by)
        for p in LISTED
    }


def unlisted(uses) -> list[str]:
    known = listed()
    return [
        str(use) for use in sorted(uses)
        if use.file not in known.get((use.kind, use.owner, use.name), ())
    ]  # fmt: skip


def test_every_use_is_listed_with_its_file():
    assert len(FILES) > 60
    found = {use for path in FILES for use in uses_of(path, path.read_text())}
    assert len(found) > 300
    assert unlisted(found) == []


def test_every_entry_is_used_by_the_files_that_it_names():
    found = defaultdict(set)
    for path in FILES:
        for use in uses_of(path, path.read_text()):
            found[use.kind, use.owner, use.name].add(name_of(path))
    assert [entry for entry in listed() if entry not in found] == []
    named, by_group = defaultdict(set), defaultdict(set)
    for (kind, owner, name), files in listed().items():
        named[kind, owner] |= files
        by_group[kind, owner] |= found[kind, owner, name]
    assert dict(named) == dict(by_group)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from vllm.v1.core.sched.request_queue import RequestQueue", "import of vllm.v1.core.sch"),
        ("import vllm.v1.outputs", "import of vllm.v1.outputs."),
        ("def f(request): return request.lora_request", "read of Request.lora_request"),
        ("def f(x): y = x.scheduler; return y.kv_cache_manager.usage", "KVCacheManager.usage"),
        ("def f(pool): return pool._maybe_evict_cached_block(1)", "_maybe_evict_cached_block"),
        ("def f(thing): return thing._secret_of_vllm", "read of ?._secret_of_vllm"),
        ("def f(runner): runner.input_batch.num_reqs = 3", "patch of InputBatch.num_reqs"),
        ("def f(scheduler): setattr(scheduler, 'finish_requests', 1)", "patch of Scheduler.finish"),
        (SCHEDULER + "Scheduler.get_grammar_bitmask = None", "patch of Scheduler.get_grammar_bit"),
        (
            SCHEDULER + "class S(Scheduler):\n    def finish_requests(self): pass",
            "override of Scheduler.finish_requests",
        ),
        (
            SCHEDULER + "class S(Scheduler):\n    def f(self): return self.encoder_cache_manager",
            "read of Scheduler.encoder_cache_manager",
        ),
        ("class VTokenSchedulerMixin:\n    def finish_requests(self): pass", "override of Schedul"),
        ("class VTokenRunnerV1Mixin:\n    def execute_model(self): pass", "override of GPUModelR"),
        (PORTS + "def f(x: Request | None): return x.lora_request", "read of Request.lora_request"),
        (PORTS + "def f(x: BlockManager): x.block_size = 1", "patch of FullAttentionManager.block_"),
        (PORTS + "def f(x: list[Block]): return x[0].next_free_block", "KVCacheBlock.next_free_blo"),
        (PORTS + "def f(x: list[Block]): return [y.a for y in x[1:]]", "read of KVCacheBlock.a"),
        (
            PORTS + "class C:\n    def __init__(self, x: Pool): self.y = x\n"
            "    def f(self): return self.y.free_block_queue",
            "read of BlockPool.free_block_queue",
        ),
        (
            PORTS + "class C:\n    x: Scheduler\n    def f(self): return self.x.connector",
            "read of Scheduler.connector",
        ),
    ],
)  # fmt: skip
def test_a_use_that_is_not_listed_is_found(source, found):
    """The rules above hold nothing if the reader misses a use."""
    wrong = unlisted(uses_of(ROOT / "vtoken" / "vllm_plugin" / "planted.py", source))
    assert any(found in sentence for sentence in wrong), wrong


def test_what_ports_declare_is_listed_and_decisions_use_no_more():
    """Another object in vLLM's place would lack what the decisions use undeclared."""
    declared = declared_by_ports()
    assert len(declared) > 30
    assert declared - {(owner, name) for kind, owner, name in listed() if kind == "read"} == set()
    owners = {owner for owner, _ in declared}
    folder = ROOT / "vtoken" / "scheduling"
    undeclared = [
        str(use) for path in sorted(folder.rglob("*.py"))
        for use in uses_of(path, path.read_text())
        if use.owner in owners and (use.owner, use.name) not in declared
    ]  # fmt: skip
    assert undeclared == []


def test_each_side_checks_its_part_when_it_starts():
    calls = [
        node for path in FILES for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("compat.check", "check")
        and len(node.args) == 1 and isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    assert {call.args[0].value for call in calls} == {p.side for p in LISTED} - {"tools"}


def test_the_installed_vllm_is_as_listed():
    assert [p.find_fault() for p in LISTED if p.find_fault()] == []


def test_what_is_patched_or_overridden_says_when_it_can_go():
    for point in LISTED:
        assert point.until or point.kind in ("import", "read") or point.side == "gpu", point.where


def test_entries_can_differ_between_versions(monkeypatch, tmp_path):
    table = tmp_path / "touchpoints.yaml"
    group = {
        "kind": "read", "where": "vllm.v1.request:Request", "side": "scheduler", "used_by": "hooks",
    }  # fmt: skip
    table.write_text(yaml.safe_dump({
        "tested": ["0.32", "0.33"], "imports": {},
        "touchpoints": [
            {**group, "names": {"request_id": "str"}},
            {**group, "names": {"new_name": "int"}, "versions": ["0.33"]},
        ],
    }))  # fmt: skip
    monkeypatch.setattr(compat, "TABLE", table)
    compat.touchpoints.cache_clear(), compat.tested.cache_clear()
    try:
        assert compat.tested_text() == ">=0.32,<0.34"
        monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.1")
        compat.check("scheduler")
        monkeypatch.setattr(compat, "vllm_version", lambda: "0.33.0")
        with pytest.raises(compat.UnsupportedError, match="Request.new_name is gone"):
            compat.check("scheduler")
    finally:
        compat.touchpoints.cache_clear(), compat.tested.cache_clear()


def test_types_of_what_is_read_are_those_of_a_live_scheduler():
    from vtoken.config import VTokenConfig
    from vtoken.engine.dry import DryEngine, DrySettings

    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=64)
    with DryEngine(DrySettings(num_kv_blocks=40), config) as engine:
        engine.add("a", list(range(100)), 20)
        engine.step()
        scheduler = engine.scheduler
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        live = {
            "Scheduler": scheduler, "Request": scheduler.requests["a"], "BlockPool": engine.block_pool,
            "FullAttentionManager": manager, "KVCacheManager": scheduler.kv_cache_manager,
            "KVCacheCoordinator": scheduler.kv_cache_manager.coordinator,
            "KVCacheBlock": manager.req_to_blocks["a"][0],
        }  # fmt: skip
        checked = 0
        for p in LISTED:
            if p.kind == "read" and p.owner in live and not p.signature.startswith("("):
                value = getattr(live[p.owner], p.name)
                names = {c.__name__ for c in type(value).__mro__}
                assert p.signature in names, (p.where, p.signature, names)
                checked += 1
        assert checked > 40
