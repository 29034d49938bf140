"""The flags of `radixcache serve`; `settings.py` says what their values may be."""

from __future__ import annotations

import argparse

_KEY = "every user of this machine sees it in the list of processes; rather"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those about being a server."""
    group = parser.add_argument_group(
        "server",
        "Each flag may be a variable, as RADIXCACHE_PORT, or stand in the file of --config.",
    )
    group.add_argument("--config", metavar="FILE", help="YAML such as `port: 8001`; flags stand")
    group.add_argument("--host", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", metavar="N", help="port (8000); 0 takes a free one")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send, else all are served; {_KEY} RADIXCACHE_API_KEY",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the file that has it")
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"lets who sends it see and flush the cache of all; {_KEY} RADIXCACHE_ADMIN_KEY",
    )
    group.add_argument("--admin-key-file", metavar="FILE", help="the file that has it")
    group.add_argument(
        "--allowed-host",
        nargs="+",
        metavar="NAME",
        help="names that lead here, for clients without a key (localhost, addresses)",
    )
    group.add_argument(
        "--allow-origin",
        nargs="+",
        metavar="ORIGIN",
        help="web pages that may use the server, like https://app.example.org; * is all",
    )
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names in the API (--model's)"
    )
    group.add_argument(
        "--max-queued-requests",
        metavar="N",
        help="may wait, half of them one client's; more get status 429 (1024)",
    )
    group.add_argument("--request-timeout", metavar="S", help="seconds for a request (600)")
    group.add_argument("--max-body-size", metavar="N", help="bytes of a request (16 MiB)")
    group.add_argument(
        "--hide-texts",
        action="store_true",
        default=None,
        help="show no texts of prompts in the tree and in explanations",
    )
    group.add_argument(
        "--access-log",
        action="store_true",
        default=None,
        help="print a line of JSON for each request that is answered",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="an OpenTelemetry collector for traces, like http://127.0.0.1:4318",
    )
    group.add_argument(
        "--replicas",
        metavar="N",
        help="run N servers of the model behind this address, or N..M as the load is; needs Ray",
    )
    group.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="""as vLLM's, '{"enable_kv_cache_events": true}': tell routers what is cached""",
    )
    group.add_argument(
        "--shutdown-timeout",
        metavar="S",
        help="seconds for running requests to end on SIGTERM (30)",
    )
