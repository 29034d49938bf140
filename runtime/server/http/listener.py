"""The socket that a server listens on; opened before anything heavy is imported."""

from __future__ import annotations

import os
import socket

from radixcache.errors import InvalidRequest


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `InvalidRequest` if there cannot be one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:  # its text may repeat the address
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        reason = str(reason).partition(" (while")[0]
        raise InvalidRequest(f"cannot listen on {host} port {port}: {reason}") from None
    except OverflowError:
        raise InvalidRequest(f"port must be from 0 to 65535, not {port}") from None
    except (TypeError, ValueError):  # not encodable as a host name
        raise InvalidRequest(f"not a host: {host!r}") from None
    # Connections inherit it; asyncio sets it only on sockets that name their protocol. Without it,
    # an answer's body waits 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
