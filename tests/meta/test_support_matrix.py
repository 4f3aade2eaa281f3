"""The support matrix says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken_cli.support_matrix import SUPPORT

ROOT = Path(__file__).resolve().parents[2]


def test_rows_are_complete_and_differ():
    features = [row.feature for row in SUPPORT]
    assert len(set(features)) == len(features)
    assert all(row.evidence for row in SUPPORT)


def test_what_works_names_a_test_that_exists():
    for row in SUPPORT:
        if row.state == "works":
            assert (ROOT / row.evidence).is_file(), row


@pytest.mark.vllm
def test_what_the_plugin_refuses_is_listed_with_the_same_reason():
    from vtoken.vllm_plugin import support

    listed = {row.feature: row for row in SUPPORT}
    refused = {feature: why for feature, _, why in support._REFUSED}
    assert refused
    for feature, why in refused.items():
        assert feature in listed, feature
        assert (listed[feature].state, listed[feature].evidence) == ("refused", why)
