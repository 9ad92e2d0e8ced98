"""vLLM over kvd: `kv_connector_module_path="kvd_client.integrations.vllm"`. See docs/vllm.md."""

from kvd_client.integrations.vllm.connector import KvdConnector

__all__ = ["KvdConnector"]
