# mypy: disable-error-code="import-not-found"
"""Plugins for vLLM and SGLang that explain why a prompt was not cached there.

Both functions are entry points (`pyproject.toml`) that the engines call when they start. They
register a name for the engine's command line and change nothing else; see `docs/plugins.md`.
"""

from typing import Any


def register_vllm() -> None:
    """Let `--kv-transfer-config` name `RadixCacheConnector`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "RadixCacheConnector"
    KVConnectorFactory.register_connector(name, "radixcache.plugins.vllm", name)


def register_sglang() -> None:
    """Let `--radix-cache-backend` name `radixcache`."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    def make_tree_cache(context: Any) -> Any:
        from radixcache.plugins.sglang import make_tree_cache

        return make_tree_cache(context)

    register_radix_cache_backend("radixcache", make_tree_cache)
