"""A Prometheus endpoint: plain text over HTTP, on loopback unless told otherwise.

It shows numbers of one run and takes no input.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ntp_launcher.audience import Listener
from ntp_launcher.flags import LaunchError
from ntp_launcher.progress import Snapshot


class Prometheus(Listener):
    """`http://HOST:PORT/metrics`, as of the newest look. Port 0 takes a free one, which `url` tells.

    Raises LaunchError for an address at which this host cannot listen.
    """

    def __init__(self, host: str, port: int) -> None:
        self._text = b""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] == "/metrics"
                body = exporter._text if known else b"metrics are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Keeps requests off the terminal."""

        self._server = _listen(host, port, Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def look(self, snapshot: Callable[[], Snapshot]) -> None:
        """Renders the text that is served from now on."""
        self._text = prometheus_text(snapshot()).encode()

    def close(self) -> None:
        """Stops to listen."""
        self._server.shutdown()
        self._server.server_close()


def check_address(host: str, port: int) -> None:
    """Raises LaunchError where `Prometheus` would."""
    _listen(host, port, BaseHTTPRequestHandler).server_close()


def _listen(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    try:
        server = ThreadingHTTPServer((host, port), handler)
    except OSError as error:
        key = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        advice = "; port 0 takes a free one" if key == "port" else ""
        raise LaunchError(
            f"log.prometheus_{key}={port if key == 'port' else host}: cannot listen on {host}:{port} "
            f"({error.strerror}){advice}"
        ) from None
    server.daemon_threads = True
    return server


def prometheus_text(snapshot: Snapshot) -> str:
    """The snapshot in Prometheus' text format."""
    return "".join(
        f"# HELP ntp_{name} {help}\n# TYPE ntp_{name} {kind}\nntp_{name}{labels} {value:.10g}\n"
        if first
        else f"ntp_{name}{labels} {value:.10g}\n"
        for name, kind, help, labels, value, first in _samples(snapshot)
    )


_Sample = tuple[str, str, str, str, float, bool]


def _samples(snapshot: Snapshot) -> Iterator[_Sample]:
    def gauge(name: str, help: str, value: float | None, kind: str = "gauge") -> Iterator[_Sample]:
        if value is not None:
            yield name, kind, help, "", float(value), True

    line = snapshot.line
    yield from gauge("step", "newest committed step", snapshot.step)
    yield from gauge("loss", "mean loss of that step", line.get("loss"))
    yield from gauge("grad_norm", "norm of its gradient", line.get("grad_norm"))
    yield from gauge("step_seconds", "time of a step, smoothed", snapshot.step_s)
    yield from gauge("tokens_per_second", "tokens, smoothed", snapshot.tokens_per_s)
    yield from gauge("mfu_ratio", "model FLOP utilisation", snapshot.mfu)
    yield from gauge("memory_bytes", "peak memory of the reporter", line.get("memory_bytes"))
    yield from gauge("goodput_ratio", "share of time in committed steps", snapshot.goodput)
    yield from gauge("capacity_ratio", "ranks with a shard over base ranks", snapshot.capacity)
    yield from gauge("mean_capacity_ratio", "its mean over time", snapshot.mean_capacity)
    yield from gauge("generation", "of membership", snapshot.generation)
    yield from gauge("recovering", "1 while no step is committed", snapshot.recovering_s is not None)
    yield from gauge("losses_total", "changes of membership by a loss", snapshot.recoveries, "counter")
    for place, (part, seconds) in enumerate(snapshot.last_recovery.items()):
        help = "parts of the newest recovery"
        yield "recovery_seconds", "gauge", help, f'{{part="{part}"}}', seconds, place == 0
    for place, replica in enumerate(snapshot.replicas):
        labels = f'{{replica="{replica.index}"}}'
        yield "degree", "gauge", "live ranks of a replica", labels, float(replica.degree), place == 0
