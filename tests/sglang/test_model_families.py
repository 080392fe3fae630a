"""The table of model families, where it can be held against SGLang's own code."""

from __future__ import annotations

from tests.engines.worker import Worker
from tests.model_families import FAMILIES


def test_windows_have_a_pool_of_their_own_where_the_table_says_so(sglang: Worker) -> None:
    families = [family for family in FAMILIES if family.pool in {"MHATokenToKVPool", "SWAKVPool"}]
    said = sglang.run(
        "tests.sglang.families:have_windows", architectures=[family.architecture for family in families]
    )
    assert said == [family.pool == "SWAKVPool" for family in families]
    assert any(said) and not all(said)
