"""vLLM's NixlConnector on NIXL agents whose progress thread sleeps between two looks; by default it spins.

Two servers with a spinning thread each leave a machine with two cores no time to compute. NIXL's own Python
interface sets the delay to 0 and offers no other.
"""

from __future__ import annotations

from typing import Any

from nixl import _api
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

__all__ = ["NixlConnector"]

DELAY_US = 1000


class _PatientConfig(_api.nixlBind.nixlAgentConfig):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, DELAY_US if name == "pthrDelay" else value)


_api.nixlBind.nixlAgentConfig = _PatientConfig
