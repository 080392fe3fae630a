"""Settings: KVBM's environment variables, our own, and ``kv_connector_extra_config``, read once at start."""

from __future__ import annotations

from kvbm_core.config.fields import Adapter
from kvbm_core.config.settings import KvbmSettings, SettingRow, SettingSource

__all__ = ["Adapter", "KvbmSettings", "SettingRow", "SettingSource"]
