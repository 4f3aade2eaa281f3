"""Loaders of text datasets: what they read, and what they say about files they cannot read."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from pathlib import Path

import pytest

from vtoken.errors import ConfigError
from vtoken.workloads import (
    NO_BOUNDS,
    LengthBounds,
    dataset_texts,
    detect_format,
    load_longbench,
    load_prompts,
    load_sharegpt,
    load_workload,
)

DATA = Path(os.environ.get("VTOKEN_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no workload data at {DATA}; set VTOKEN_TEST_DATA"
)


class Words:
    """A tokenizer with one token a word, and a BOS."""

    chat_template = "yes"

    def encode(self, text, add_special_tokens=True):
        ids = [sum(word.encode()) for word in text.split()]
        return [1] * add_special_tokens + ids

    def decode(self, ids):
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}> {m['content']} </> " for m in messages) + "<assistant> "


def chat(*turns: tuple[str, str], **extra) -> dict:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **extra}


def write(path: Path, *rows, lines: bool = False) -> Path:
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(list(rows), indent=0)
    path.write_text(text, encoding="utf-8")
    return path


def vllm_rule():
    """vLLM's own filter, out of its source: importing its benchmarks takes 20 seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "benchmarks" / "datasets" / "datasets.py"
    (function,) = (
        node for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "is_valid_sequence"
    )  # fmt: skip
    scope: dict = {}
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)  # noqa: S102 - vLLM's own source
    return scope["is_valid_sequence"]


HELLO = chat(("human", "tell me about the sea please"), ("gpt", "it is wide and salt"), id="a")
LONG = chat(("human", "word " * 2000), ("gpt", "yes that is a lot"), id="b")


def test_sharegpt_takes_first_human_turn_and_length_of_answer(tmp_path):
    rows = write(tmp_path / "c.json", HELLO, LONG, chat(("human", "only a question asked here")))
    (request,) = load_sharegpt(rows, Words())
    assert request.request_id == "a"
    assert request.prompt == "tell me about the sea please"
    assert (request.prompt_len, request.output_len) == (7, 6)  # BOS included, as in vLLM
    assert len(request.prompt_token_ids) == 7


def test_sharegpt_agrees_with_the_benchmark_it_is_taken_from(tmp_path):
    is_valid_sequence = vllm_rule()
    words = [("human", "w " * n) for n in (1, 2, 3, 4, 50, 1022, 1023, 1024, 1500)]
    rows = [
        chat(turn, ("gpt", "a " * m)) for turn in words for m in (1, 2, 3, 500, 1023, 1024, 1025)
    ]
    kept = load_sharegpt(write(tmp_path / "c.json", *rows), Words())
    expected = []
    for row in rows:
        lengths = [len(Words().encode(turn["value"])) for turn in row["conversations"]]
        if is_valid_sequence(*lengths):
            expected.append(tuple(lengths))
    assert [(r.prompt_len, r.output_len) for r in kept] == expected
    assert 0 < len(expected) < len(rows)


def test_sharegpt_skips_turns_before_the_first_human_one(tmp_path):
    row = chat(("system", "be nice"), ("gpt", "hello there you"), ("human", "one two three four"),
               ("gpt", "five six seven eight"))  # fmt: skip
    (request,) = load_sharegpt(write(tmp_path / "c.json", row), Words())
    assert request.prompt == "one two three four"


def test_sharegpt_joins_all_turns(tmp_path):
    row = chat(("human", "first question"), ("gpt", "first answer"), ("human", "second question"),
               ("gpt", "the second answer is longer"))  # fmt: skip
    path = write(tmp_path / "c.json", row)
    (request,) = load_sharegpt(path, Words(), turns="all")
    assert request.prompt.startswith("User: first question\n\nAssistant: first answer\n\nUser:")
    assert request.prompt.endswith("second question\n\nAssistant:")
    assert request.output_len == 6


def test_sharegpt_output_len_overrides_the_answer_and_its_minimum(tmp_path):
    row = chat(("human", "a question of some words"), ("gpt", "no"))
    path = write(tmp_path / "c.json", row)
    with pytest.raises(ConfigError, match="1 with output below 4 tokens"):
        load_sharegpt(path, Words())
    (request,) = load_sharegpt(path, Words(), output_len=2)
    assert request.output_len == 2


def test_repeated_ids_are_numbered(tmp_path):
    requests = load_sharegpt(write(tmp_path / "c.json", HELLO, HELLO, HELLO), Words())
    assert [r.request_id for r in requests] == ["a", "a#1", "a#2"]


def test_seed_shuffles_and_num_takes(tmp_path):
    rows = [chat(("human", f"question {i} is this"), ("gpt", "a b c d"), id=i) for i in range(20)]
    path = write(tmp_path / "c.json", *rows)
    in_order = [r.request_id for r in load_sharegpt(path, Words(), num=5)]
    assert in_order == list("01234")
    one = [r.request_id for r in load_sharegpt(path, Words(), num=5, seed=1)]
    two = [r.request_id for r in load_sharegpt(path, Words(), num=5, seed=2)]
    assert one == [r.request_id for r in load_sharegpt(path, Words(), num=5, seed=1)]
    assert one != two
    with pytest.raises(ConfigError, match="--num-prompts 21: at most 20"):
        load_sharegpt(path, Words(), num=21)


def test_no_usable_rows_says_why(tmp_path):
    path = write(tmp_path / "c.json", LONG, LONG, chat(("gpt", "an answer to nothing")))
    with pytest.raises(ConfigError) as error:
        load_sharegpt(path, Words())
    assert error.value.option == "--dataset-path"
    assert "3 rows: 2 with prompt above 1,024 tokens, 1 with no answered" in str(error.value)
    with pytest.raises(ConfigError, match="0 rows"):
        load_sharegpt(write(tmp_path / "empty.json"), Words())


def test_bounds_can_be_lifted(tmp_path):
    path = write(tmp_path / "c.json", LONG)
    assert load_sharegpt(path, Words(), bounds=NO_BOUNDS)[0].prompt_len == 2001
    with pytest.raises(ConfigError, match="above 2,000"):
        load_sharegpt(path, Words(), bounds=LengthBounds(max_prompt_tokens=2000))


@pytest.mark.parametrize(
    ("text", "line", "allowed"),
    [
        ('[\n{"conversations": []},\nnonsense\n]', 3, "a JSON list of objects"),
        ('[\n{"conversations": []},\n\n 5\n]', 4, "not a number"),
        ('{"conversations": []}\n{"conversations": ', 2, "one JSON object per line"),
        ('{"conversations": []}\n[1]', 2, "not a list"),
        ('[\n\n{"conversations": 3}]', 3, 'a "conversations" list'),
        ('[{"conversations": [{"from": "human", "value": null}]}]', 1, 'a "conversations" list'),
        ('[\n{"conversations": [\n', 3, "a JSON list of objects"),
    ],
)
def test_broken_sharegpt_names_file_and_line(tmp_path, text, line, allowed):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_sharegpt(path, Words())
    assert error.value.value == f"{path}:{line}"
    assert allowed in error.value.allowed
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="a readable file .No such file"):
        load_sharegpt(tmp_path / "nowhere.json", Words())
    (tmp_path / "b.json").write_bytes(b'[{"a": 1},\n\xff\xfe]')
    with pytest.raises(ConfigError, match="b.json:2.*UTF-8"):
        load_sharegpt(tmp_path / "b.json", Words())


ROW = {"_id": "q1", "dataset": "d", "input": "what is it", "context": "it is a stone",
       "answers": ["stone"], "context_id": 7}  # fmt: skip


def test_longbench_puts_context_first_and_keeps_answers(tmp_path):
    (request,) = load_longbench(write(tmp_path / "l.jsonl", ROW, lines=True), Words())
    assert request.prompt == "it is a stone\n\nwhat is it\nAnswer:"
    assert request.answers == ("stone",)
    assert request.metadata["context_id"] == 7 and request.metadata["question"] == "what is it"
    assert request.dataset == "d" and request.request_id == "q1" and request.output_len == 64


def test_longbench_braces_inside_the_data_are_data(tmp_path):
    path = write(tmp_path / "l.jsonl", ROW | {"context": "a {input} b"}, lines=True)
    (request,) = load_longbench(path, Words(), output_len=3)
    assert request.prompt == "a {input} b\n\nwhat is it\nAnswer:"


@pytest.mark.parametrize("field", ["input", "context", "answers"])
def test_longbench_row_without_a_field(tmp_path, field):
    bad = {k: v for k, v in ROW.items() if k != field}
    with pytest.raises(ConfigError, match=f"l.jsonl:2.*{field}"):
        load_longbench(write(tmp_path / "l.jsonl", ROW, bad, lines=True), Words())


def test_longbench_leaves_out_what_is_too_long(tmp_path):
    path = write(tmp_path / "l.jsonl", ROW, ROW | {"context": "long " * 90}, lines=True)
    bounds = LengthBounds(max_prompt_tokens=50, max_total_tokens=None)
    assert len(load_longbench(path, Words(), bounds=bounds)) == 1
    bounds = LengthBounds(max_prompt_tokens=5)
    with pytest.raises(ConfigError, match="2 rows: 2 with prompt above 5 tokens"):
        load_longbench(path, Words(), bounds=bounds)


def test_prompt_rows(tmp_path):
    path = write(
        tmp_path / "p.jsonl", {"prompt": "one two", "output_tokens": 9}, {"turns": ["a b", "c"]},
        lines=True,
    )  # fmt: skip
    first, second = load_prompts(path, Words())
    assert (first.prompt, first.output_len) == ("one two", 9)
    assert (second.prompt, second.output_len) == ("a b", 128)
    assert {r.output_len for r in load_prompts(path, Words(), output_len=5)} == {5}
    bad = write(tmp_path / "q.jsonl", {"prompt": "x", "output_tokens": 0}, lines=True)
    with pytest.raises(ConfigError, match="q.jsonl:1.*at least 1"):
        load_prompts(bad, Words())


def test_texts_for_cutting(tmp_path):
    assert dataset_texts(write(tmp_path / "c.json", HELLO)) == [
        "tell me about the sea please\n\nit is wide and salt"
    ]
    twice = write(tmp_path / "l.jsonl", ROW, ROW, lines=True)
    assert dataset_texts(twice) == ["it is a stone"]
    folder = tmp_path / "texts"
    folder.mkdir()
    with pytest.raises(ConfigError, match="holds none"):
        dataset_texts(folder)
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first")
    assert dataset_texts(folder) == ["first", "second"]


def test_detection_and_its_refusals(tmp_path):
    assert detect_format(write(tmp_path / "c.json", HELLO)) == "sharegpt"
    assert detect_format(write(tmp_path / "l.jsonl", ROW, lines=True)) == "longbench"
    assert detect_format(write(tmp_path / "p.jsonl", {"prompt": "x"}, lines=True)) == "prompts"
    (tmp_path / "t.md").write_text("text")
    assert detect_format(tmp_path / "t.md") == "text"
    for name, text, allowed in [
        ("empty.json", " \n", "this file is empty"),
        ("odd.jsonl", '{"colour": "red"}', "this row has colour"),
        ("odd.csv", "a,b\n1,2", "columns TIMESTAMP"),
        ("odd.bin", "hello", "ShareGPT JSON"),
        ("none.json", "[]", "this row has nothing"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=allowed):
            detect_format(tmp_path / name)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        load_workload(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="plain text has no requests"):
        load_workload(tmp_path / "t.md", Words())


@needs_data
@pytest.mark.parametrize(
    ("name", "format", "num"),
    [
        ("chat/mtbench101_sharegpt.json", "sharegpt", 1388),
        ("chat/longchat_topics_sharegpt.json", "sharegpt", 58),
        ("longctx/nq_multidoc_qa.jsonl", "longbench", 110),
        ("longctx/kv_retrieval_75.jsonl", "longbench", 20),
        ("prompts/mt_bench_question.jsonl", "prompts", 80),
    ],
)
def test_real_files(name, format, num):
    assert detect_format(DATA / name) == format
    requests = load_workload(DATA / name, Words(), bounds=NO_BOUNDS)
    assert len(requests) == num
    assert len({r.request_id for r in requests}) == num
    if format == "longbench":
        assert all(r.answers and r.answers[0] for r in requests)
    assert len(dataset_texts(DATA / name)) > 5
