"""Traces: times, lengths, prefix hashes, and the token ids made up from them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from vtoken.errors import ConfigError
from vtoken.workloads import (
    WorkloadRequest,
    detect_format,
    load_azure,
    load_mooncake,
    load_servegen,
    load_workload,
    scale_rate,
    trace_token_ids,
    with_arrivals,
)

DATA = Path(os.environ.get("VTOKEN_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no workload data at {DATA}; set VTOKEN_TEST_DATA"
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,27
"""
SERVEGEN = "timestamp_s,input_tokens,output_tokens,reason_ratio\n1.5,10,20,0.1\n2.0,30,40,0.2\n"
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 1500, "input_length": 513, "output_length": 6, "hash_ids": [0, 2]}
"""


def put(tmp_path: Path, name: str, text: str) -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_azure(tmp_path):
    path = put(tmp_path, "a.csv", AZURE)
    requests = load_azure(path)
    assert detect_format(path) == "azure"
    assert [(r.prompt_len, r.output_len) for r in requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert [r.arrival_s for r in requests] == pytest.approx([0, 0.052, 0.052], abs=1e-6)
    assert all(r.prompt is None and r.prompt_token_ids is None for r in requests)
    zoned = AZURE.replace("00,", "00+00:00,")
    assert load_azure(put(tmp_path, "z.csv", zoned))[1].arrival_s == pytest.approx(0.052, abs=1e-6)


def test_servegen(tmp_path):
    path = put(tmp_path, "s.csv", SERVEGEN)
    assert detect_format(path) == "servegen"
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in load_servegen(path)] == [
        (0.0, 10, 20), (0.5, 30, 40),
    ]  # fmt: skip


def test_mooncake(tmp_path):
    path = put(tmp_path, "m.jsonl", MOONCAKE)
    assert detect_format(path) == "mooncake"
    first, second = load_mooncake(path)
    assert (second.arrival_s, second.prefix_block_tokens) == (1.5, 512)
    assert second.prefix_hash_ids == (0, 2)
    assert first.request_id != second.request_id
    assert load_workload(path, num=1) == [first]
    with pytest.raises(ConfigError, match="at most 2"):
        load_workload(path, num=3)


@pytest.mark.parametrize(
    ("loader", "text", "line", "allowed"),
    [
        (load_azure, "TIMESTAMP,ContextTokens\n", 1, "GeneratedTokens missing"),
        (load_azure, "", 1, "missing among nothing"),
        (load_azure, AZURE + "2023-11-16 18:17:04.03,1,1\n", 5, "rows sorted by time"),
        (load_azure, AZURE + "yesterday,1,1\n", 5, "a date and time"),
        (load_azure, AZURE + "2023-11-16 18:17:05,1.5,1\n", 5, "a whole number of prompt tokens"),
        (load_azure, AZURE + "2023-11-16 18:17:05,1,-3\n", 5, "a whole number of output tokens"),
        (load_azure, AZURE + "2023-11-16 18:17:05,1," + "9" * 5000, 5, "output tokens, not '999"),
        (load_azure, AZURE + "x" * 200_000 + ",1,1\n", 5, "field larger than field limit"),
        (load_azure, AZURE + "2023-11-16 18:17:05,1\n", 5, "3 columns, found 2"),
        (load_servegen, SERVEGEN + "1.9,1,1,0\n", 4, "this is 0.1 s back"),
        (load_servegen, "timestamp_s,input_tokens,output_tokens\n-1,2,3\n", 2, "not -1 s"),
        (load_servegen, "timestamp_s,input_tokens,output_tokens\nnan,2,3\n", 2, "at least 0"),
        (load_servegen, "timestamp_s,input_tokens,output_tokens\nx,2,3\n", 2, "seconds"),
        (load_servegen, "timestamp_s,input_tokens,output_tokens\n1,2.5,3\n", 2, "whole number"),
        (load_mooncake, MOONCAKE + "{oops}\n", 3, "one JSON object per line"),
        (load_mooncake, MOONCAKE + '{"timestamp": 1}\n', 3, "hash_ids missing"),
        (load_mooncake, MOONCAKE.replace("1500", "-5"), 2, "at least 0"),
        (load_mooncake, MOONCAKE.replace('"timestamp": 0', '"timestamp": 2000'), 2, "sorted"),
        (load_mooncake, MOONCAKE.replace("1500", '"soon"'), 2, "a number in timestamp (ms)"),
        (load_mooncake, MOONCAKE.replace("1500", "1" + "0" * 400), 2, "a number in timestamp (ms)"),
        (load_mooncake, MOONCAKE.replace("1500", "Infinity"), 2, "a number in timestamp (ms)"),
        (load_mooncake, MOONCAKE.replace("1500", "9" * 5000), 2, "per line (Exceeds the limit"),
        (load_mooncake, MOONCAKE.replace("1500", "[" * 100_000), 2, "nested too deep"),
        (load_mooncake, MOONCAKE.replace("513", "512"), 2, "1 for 512 tokens, found 2 (--hash-bl"),
        (load_mooncake, MOONCAKE.replace("[0, 2]", "[0, -2]"), 2, "hash_ids, a list"),
        (load_mooncake, MOONCAKE.replace("513", "true"), 2, "prompt tokens"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, loader, text, line, allowed):
    path = put(tmp_path, "bad", text)
    with pytest.raises(ConfigError) as error:
        loader(path)
    assert error.value.value == f"{path}:{line}"
    assert allowed in error.value.allowed, error.value
    assert "\n" not in str(error.value)


def test_trace_without_rows(tmp_path):
    for loader, text in [(load_azure, AZURE.split("\n")[0]), (load_mooncake, "\n")]:
        with pytest.raises(ConfigError, match="usable rows .0 rows"):
            loader(put(tmp_path, "e", text))


def test_rows_without_tokens_are_left_out_and_counted(tmp_path, caplog):
    text = AZURE + "2023-11-16 18:17:05,0,1\n2023-11-16 18:17:06,7,0\n2023-11-16 18:17:07,8,9\n"
    requests = load_azure(put(tmp_path, "a.csv", text))
    assert [(r.prompt_len, r.output_len) for r in requests[3:]] == [(8, 9)]
    assert "a.csv: left out 2 rows without prompt or output tokens" in caplog.text
    with pytest.raises(ConfigError, match="usable rows .1 rows: 1 with no prompt or output"):
        load_azure(put(tmp_path, "b.csv", "\n".join([AZURE.split("\n")[0], text.split("\n")[4]])))


def test_a_quoted_header(tmp_path):
    header, rest = AZURE.split("\n", 1)
    quoted = ",".join(f'"{name}"' for name in header.split(",")) + "\n" + rest
    path = put(tmp_path, "q.csv", quoted)
    assert detect_format(path) == "azure" and len(load_workload(path)) == 3


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
118,GPT-4,417,0,417,API log
"""


def test_burstgpt(tmp_path):
    path = put(tmp_path, "b.csv", BURSTGPT)
    assert detect_format(path) == "burstgpt"
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in load_workload(path)] == [
        (0.0, 472, 18), (40.5, 1087, 230),
    ]  # fmt: skip


BAILIAN = """{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, \
"output_length": 5, "type": "text", "turn": 1, "hash_ids": [10, 11, 12]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.614, "input_length": 48, \
"output_length": 6, "type": "text", "turn": 2, "hash_ids": [10, 13, 12]}
"""


def test_alibabas_traces_are_in_seconds_and_blocks_of_16(tmp_path):
    path = put(tmp_path, "q.jsonl", BAILIAN)
    first, second = load_workload(path)
    assert second.arrival_s == pytest.approx(1.5)
    assert first.prefix_block_tokens == second.prefix_block_tokens == 16
    # The third blocks hold the same text, but what comes before differs.
    assert first.prefix_hash_ids[0] == second.prefix_hash_ids[0]
    assert not set(first.prefix_hash_ids[1:]) & set(second.prefix_hash_ids[1:])


def test_the_user_says_what_an_id_stands_for(tmp_path):
    path = put(tmp_path, "m.jsonl", MOONCAKE)
    requests = load_workload(path, hash_block_tokens=300, time_unit="us", num=1)
    assert requests[0].prefix_block_tokens == 300
    path = put(tmp_path, "n.jsonl", MOONCAKE.replace("513", "600"))
    assert load_workload(path, time_unit="us")[1].arrival_s == pytest.approx(0.0015)
    with pytest.raises(ConfigError, match="--time-unit 'h': one of ms, s, us"):
        load_mooncake(path, time_unit="h")
    with pytest.raises(ConfigError, match="--hash-block-tokens 0: a whole number, 1 or more"):
        load_mooncake(path, hash_block_tokens=0)
    with pytest.raises(ConfigError, match="--time-unit 's': a trace with prefix hashes"):
        load_workload(put(tmp_path, "a.csv", AZURE), time_unit="s")


@pytest.mark.parametrize("other", [7 + 2**63, 7 + 2**64, 2**200])
def test_large_hashes_stay_different(tmp_path, other):
    path = put(tmp_path, "m.jsonl", MOONCAKE.replace("[0, 1]", "[7, 1]").replace(
        "[0, 2]", f"[{other}, 1]"))  # fmt: skip
    a, b = load_workload(path)
    assert not set(a.prefix_hash_ids) & set(b.prefix_hash_ids)
    a, b = (trace_token_ids(r, vocab_size=2**31) for r in (a, b))
    assert (a[:513] == b[:513]).mean() < 0.01


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_names_the_file(tmp_path, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes((AZURE + "caf\u00e9").encode(encoding))
    with pytest.raises(ConfigError, match=r"a.csv:\d+': UTF-8 text, but this line"):
        load_workload(path)


@pytest.mark.parametrize("form", ["{}\n", "[{}]"])
def test_half_a_character_names_the_line(tmp_path, form):
    row = '{"prompt": "half \\ud83d"}'
    path = put(tmp_path, "p.jsonl", form.format(row))
    with pytest.raises(ConfigError, match=r"p.jsonl:1': text in Unicode, but '.ud83d' is half"):
        detect_format(path)
    put(tmp_path, "p.jsonl", form.format(row.replace("ud83d", "ud83d\\ude00")))
    assert detect_format(path) == "prompts"


def lengths_only(prompt_len: int, hashes: tuple[int, ...] = ()) -> WorkloadRequest:
    return WorkloadRequest(
        request_id="r", prompt_len=prompt_len, output_len=1, prefix_hash_ids=hashes,
        prefix_block_tokens=512 if hashes else 0,
    )  # fmt: skip


def test_token_ids_share_prefixes_exactly_where_hashes_do():
    a = trace_token_ids(lengths_only(1500, (0, 1, 2)), vocab_size=50_000)
    b = trace_token_ids(lengths_only(1400, (0, 1, 3)), vocab_size=50_000)
    assert len(a) == 1500 and a.min() >= 0 and a.max() < 50_000
    np.testing.assert_array_equal(a[:1024], b[:1024])
    assert (a[1024:1400] == b[1024:]).mean() < 0.01
    assert len(np.unique(a)) > 1400  # not a pattern that repeats
    other_seed = trace_token_ids(lengths_only(1500, (0, 1, 2)), vocab_size=50_000, seed=1)
    assert (a == other_seed).mean() < 0.01


def test_token_ids_without_hashes_share_nothing():
    a = trace_token_ids(lengths_only(600), vocab_size=50_000, index=0)
    b = trace_token_ids(lengths_only(600), vocab_size=50_000, index=1)
    hashed = trace_token_ids(lengths_only(600, (0, 1)), vocab_size=50_000)
    assert max((a == b).mean(), (a == hashed).mean()) < 0.01
    np.testing.assert_array_equal(a, trace_token_ids(lengths_only(600), vocab_size=50_000))


def test_rate_scaling():
    requests = [
        WorkloadRequest(request_id=str(i), prompt_len=1, output_len=1, arrival_s=float(i))
        for i in range(3)
    ]
    assert [r.arrival_s for r in scale_rate(requests, 2)] == [0, 0.5, 1.0]
    with pytest.raises(ConfigError, match="--rate-scale"):
        scale_rate(requests, 0)


def test_open_loop_arrivals():
    requests = [lengths_only(1)] * 4000
    times = np.array([r.arrival_s for r in with_arrivals(requests, 5.0, seed=3)])
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)  # Poisson: spread equals mean
    bursty = np.diff([r.arrival_s for r in with_arrivals(requests, 5.0, burstiness=0.25)])
    assert bursty.std() == pytest.approx(0.4, rel=0.15)
    even = np.diff([r.arrival_s for r in with_arrivals(requests, 5.0, burstiness=float("inf"))])
    assert even == pytest.approx(np.full(3999, 0.2))
    assert {r.arrival_s for r in with_arrivals(requests, float("inf"))} == {0.0}
    assert with_arrivals([], 5.0) == []
    with pytest.raises(ConfigError, match="--request-rate"):
        with_arrivals(requests, 0)
    with pytest.raises(ConfigError, match="--burstiness"):
        with_arrivals(requests, 1, burstiness=0)


@needs_data
@pytest.mark.parametrize(
    ("name", "num", "last_s"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19366, None),
        ("AzureLLMInferenceTrace_code.csv", 8819, None),
        ("mooncake_conversation_4000.jsonl", 4000, 1301.999),
        ("servegen_sampled_deepseek_r1_3000.csv", 3000, 153.642),
    ],
)
def test_real_traces(name, num, last_s):
    requests = load_workload(DATA / "traces" / name)
    assert len(requests) == num
    times = np.array([r.arrival_s for r in requests])
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    if last_s:
        assert times[-1] == pytest.approx(last_s)


@needs_data
def test_real_prefix_hashes_give_real_hits():
    requests = load_mooncake(DATA / "traces" / "mooncake_conversation_4000.jsonl", num=40)
    ids = [trace_token_ids(r, vocab_size=2**31) for r in requests]
    for i, a in enumerate(requests):
        for j, b in enumerate(requests[:i]):
            pairs = zip(a.prefix_hash_ids, b.prefix_hash_ids, strict=False)
            shared = 0
            for x, y in pairs:
                if x != y:
                    break
                shared += 512
            shared = min(shared, a.prompt_len, b.prompt_len)
            same = ids[i][: len(ids[j])] == ids[j][: len(ids[i])]
            assert (len(same) if same.all() else int(same.argmin())) == shared
