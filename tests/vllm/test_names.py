"""The names that engines are told to load."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector"])
def test_old_and_new_names_are_the_same_classes(name: str) -> None:
    from dynamo.llm.vllm_integration import connector as old
    from kvbm.vllm_integration import connector as ours

    assert getattr(ours, name) is getattr(old, name)


def test_the_consolidator_is_switched_off() -> None:
    from kvbm.vllm_integration import consolidator_config

    assert consolidator_config.get_consolidator_endpoints(None) is None
    assert consolidator_config.should_enable_consolidator(None) is False
