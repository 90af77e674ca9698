"""A program that puts secrets wherever secrets may be, makes everything fail, and prints all that
is known about each failure.

It prints tracebacks with all causes, reprs, and the log at DEBUG, and runs the commands too. The
caller searches the output for the secrets.
"""

from __future__ import annotations

import http.server
import itertools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CANARY = "cAnArY"
AZURE = "Y0FuQXJZQXp1cmU="
"""The account key, which has to be base64."""

_count = itertools.count()


def canary() -> str:
    """Return a new secret, which contains CANARY."""
    return f"{CANARY}{next(_count):03d}xyz"


# Set them before any import that might read them.
SECRETS = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET", "GOOGLE_SERVICE_ACCOUNT_KEY",
    "HADOOP_HTTP_PASSWORD", "HTTP_PASSWORD", "MY_SECRET",
)  # fmt: skip
os.environ |= {name: canary() for name in SECRETS} | {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_REGION": "us-east-1", "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": AZURE, "HOLDFAST_CONFIG": "", "HOLDFAST_OP_TIMEOUT_S": "0.3", "HOLDFAST_RETRIES": "0",
    "HOLDFAST_HDFS_TIMEOUT": "0.1s", **{f"HOLDFAST_{store}_DEADLINE": "0.1s" for store in ("S3", "GS", "AZ", "HTTP", "HTTPS")},
}  # fmt: skip


def token_file(folder: Path) -> Path:
    """Write a file of HDFS delegation tokens with a secret identifier and a secret password."""
    parts = (
        b"alias",
        canary().encode(),
        canary().encode(),
        b"HDFS_DELEGATION_TOKEN",
        b"127.0.0.1:1",
    )
    counted = b"".join(bytes([len(part)]) + part for part in parts)
    file = folder / "secret-tokens"
    file.write_bytes(b"HDTS\0" + bytes([1]) + counted + b"\0")
    return file


os.environ["HADOOP_TOKEN_FILE_LOCATION"] = str(token_file(Path(sys.argv[1])))

import torch  # noqa: E402

import holdfast  # noqa: E402
from holdfast.cli import app  # noqa: E402
from holdfast.drivers.configuration.file import Setting  # noqa: E402
from holdfast.drivers.registry import open_driver, resolved_options  # noqa: E402
from holdfast.drivers.uri import parse  # noqa: E402
from holdfast.storage.integrations.fsspec import HoldfastFileSystem  # noqa: E402


class Echo(http.server.BaseHTTPRequestHandler):
    """Refuses each request and echoes it, as a gateway in debug mode would."""

    told: list[str] = []

    def do_GET(self) -> None:
        """Answer 403, with the request's head as the body."""
        head = f"{self.path}\n{self.headers}"
        self.told.append(head)
        body = (
            f"<Error><Code>SignatureDoesNotMatch</Code><Message>{head}</Message></Error>".encode()
        )
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def echo() -> Iterator[str]:
    """Run a server that echoes; yield its host and port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def tell(work: Callable[[], Any]) -> None:
    """Run ``work``; print its result or all details of its error."""
    try:
        print("made", repr(work()))
    except BaseException as failure:
        traceback.print_exc()
        error: BaseException | None = failure
        while error is not None:
            print("raised", repr(error), str(error), vars(error))
            error = error.__cause__ or error.__context__


def command(*arguments: str) -> None:
    """Run a ``holdfast`` command, alternating between text and JSON."""
    form = [["--json"], []][next(_count) % 2]
    tell(lambda: app.run([*arguments, *form]))


def uris(server: str, conf: Path) -> list[str]:
    """Return URIs that are unreachable or refused, with secrets wherever a user may write some."""
    return [
        f"s3://user:{canary()}@bucket/run", f"s3://user:p/{canary()}@bucket", f"s3://user:p?{canary()}@bucket/run", f"s3://user:p#{canary()}@bucket/run",
        f"s3://{canary()}@bucket/run", f"s3://u:{canary()}/{canary()}@b/x?retries=many", f"s3:/user:{canary()}@bucket", f"s3:user:{canary()}@bucket",
        f"s3://bucket/run?secret_access_key={canary()}", f"s3://bucket/run?token={canary()}&endpoint=http://{server}", f"s3://bucket/run?endpoint=http://{server}",
        f"s3://bucket/run?endpoint=http://user:{canary()}@{server}", f"s3://bucket/run?endpoint=http://{server}/%3Fsig={canary()}", "s3://bucket/run?endpoint=http://127.0.0.1:1",
        f"http://user:{canary()}@{server}/run", f"http://{canary()}@{server}/run", f"http://{server}/run?X-Amz-Signature={canary()}", f"http://{server}/run",
        f"https://user:{canary()}@127.0.0.1:1/run", "https://127.0.0.1:1/run", f"gs://user:{canary()}@bucket/run", "gs://bucket/run", f"gs://bucket/run?endpoint=http://{server}",
        f"az://container/run?account_key={canary()}", f"az://container/run?endpoint=http://{server}/account", "az://container/run?endpoint=http://127.0.0.1:1/account",
        f"hdfs://user:{canary()}@127.0.0.1:1/run", f"hdfs://{canary()}@127.0.0.1:1/run", "hdfs://127.0.0.1:1/run", f"hdfs://127.0.0.1:1/run?conf={conf}",
        f"hdfs://service/run?conf={conf}", f"hdfs://127.0.0.1:1/run?conf={conf}/broken", f"hdfs://127.0.0.1:1/run?webhdfs=http://u:{canary()}@{server}",
        f"nothing://user:{canary()}@host/x?password={canary()}", f"memory://user:{canary()}@x?token={canary()}", f"file://user:{canary()}@host/x",
        f"fsspec+http://user:{canary()}@{server}/run", f"fsspec+nothing://u:{canary()}@h/x", f"fsspec+memory://x?password={canary()}",
    ]  # fmt: skip


def options(server: str) -> list[tuple[str, dict[str, Any]]]:
    """Return options that are secrets, or contain some."""
    return [
        ("s3://bucket/run", {"secret_access_key": canary(), "endpoint": f"http://{server}"}), ("s3://bucket/run", {"endpoint": f"http://u:{canary()}@{server}"}),
        ("s3://bucket/run", {"endpoint": f"http://{server}/?sig={canary()}"}), ("s3://bucket/run", {"endpoint": f"http://{server}/%3Fsig={canary()}"}),
        ("s3://bucket/run", {"endpoint": f"u:{canary()}@{server}"}), ("s3://bucket/run", {"endpoint": [canary()]}), ("gs://bucket/run", {"endpoint": f"http://u:{canary()}@{server}"}),
        ("s3://bucket/run", {"password": canary()}), ("s3://bucket/run", {"retries": canary()}), ("memory://x", {"token": canary()}),
        ("fsspec+http://x/y", {"password": canary()}), ("http://127.0.0.1:1/x", {"auth": canary()}), ("hdfs://127.0.0.1:1/x", {"webhdfs": f"http://u:{canary()}@{server}"}),
    ]  # fmt: skip


def tables(server: str) -> list[str]:
    """Return configuration files that contain secrets."""
    return [
        f'[s3]\nsecret_access_key = "{canary()}"', f'["s3://user:{canary()}@bucket"]\nretries = 1', f'["s3://user:{canary()}@bucket"]\nnothing = "{canary()}"',
        f'["s3://u:{canary()}@b?x=1"]\nretries = 1', f'["://u:{canary()}@b"]\nretries = 1', (f'[common]\ntoken = ' f'"{canary()}"'), (f'[s3]\nretries = ' f'"{canary()}"'),
        f'[s3]\nendpoint = "http://u:{canary()}@{server}"', (f'[s3]\npassword = ' f'"{canary()}'), (f'[s3]\nendpoint = ' f'["{canary()}"]'),
    ]  # fmt: skip


def hadoop(conf: Path) -> None:
    """Write Hadoop settings, some of them secret, and a file that cannot be parsed."""
    conf.joinpath("broken").mkdir(parents=True)
    secret = "".join(
        f"<property><name>{name}</name><value>{canary()}</value></property>"
        for name in (
            "fs.s3a.secret.key",
            "hadoop.http.authentication.signature.secret",
            "dfs.nameservices",
        )
    )
    conf.joinpath("core-site.xml").write_text(f"<configuration>{secret}</configuration>")
    conf.joinpath("broken", "core-site.xml").write_text(
        f"<configuration>{secret}<property></configuration>"
    )
    os.environ["HADOOP_CONF_DIR"] = str(conf)


_seen: set[str] = set()


def fail(good: Path, uri: str, given: dict[str, Any]) -> None:
    """Try every operation on a location, and print how it fails."""
    tell(lambda: holdfast.save(uri, {"w": torch.ones(3)}, storage_options=given))
    tell(lambda: holdfast.load(uri, storage_options=given))
    tell(lambda: (parse(uri), resolved_options(parse(uri), **given)))
    tell(lambda: (open_driver(uri, **given), vars(open_driver(uri, **given))))
    scheme = uri.partition(":")[0]
    if scheme in _seen:  # other operations differ only in the verb
        command("ls", uri)
        return
    _seen.add(scheme)
    tell(lambda: holdfast.open(uri, storage_options=given))
    tell(lambda: holdfast.list_checkpoints(uri, storage_options=given))
    tell(lambda: holdfast.prune(uri, dry_run=True, storage_options=given))
    tell(lambda: HoldfastFileSystem(uri, target_options=given).ls(""))
    if not given:
        tell(lambda: holdfast.copy(good, uri))
        command("drivers", uri)
        command("ls", uri)
        command("cp", uri, str(good.parent / "copied"))


def configured(server: str, file: Path) -> None:
    """Put secrets into holdfast.toml and into variables."""
    os.environ["HOLDFAST_CONFIG"] = str(file)
    for text in tables(server):
        file.write_text(text)
        tell(lambda: open_driver("s3://bucket/run"))
        tell(lambda: resolved_options(parse("s3://bucket/run")))
        command("drivers", "s3://bucket/run")
        command("ls", "s3://bucket/run")
    file.unlink()
    os.environ["HOLDFAST_CONFIG"] = ""
    for variable in ("HOLDFAST_S3_SECRET_ACCESS_KEY", "HOLDFAST_S3_RETRIES", "HOLDFAST_TOKEN", "HOLDFAST_S3_ENDPOINT", "AWS_ENDPOINT_URL"):  # fmt: skip
        before = os.environ.pop("HOLDFAST_S3_ENDPOINT")
        os.environ[variable] = (
            f"http://u:{canary()}@{server}" if "ENDPOINT" in variable else canary()
        )
        tell(lambda: open_driver("s3://bucket/run"))
        tell(lambda: holdfast.open("s3://bucket/run"))
        command("drivers", "s3://bucket/run")
        command("drivers", "s3")
        del os.environ[variable]
        os.environ["HOLDFAST_S3_ENDPOINT"] = before


def main(folder: Path) -> None:
    """Run everything."""
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    good = folder / "good"
    holdfast.save(good, {"w": torch.ones(1000), "step": 1})
    hadoop(folder / "secret-conf")
    tell(lambda: Setting(canary(), "a test"))
    with echo() as server:
        os.environ["HOLDFAST_S3_ENDPOINT"] = f"http://{server}"
        for uri in uris(server, folder / "secret-conf"):
            fail(good, uri, {})
        for uri, given in options(server):
            fail(good, uri, given)
        configured(server, folder / "holdfast.toml")
    for arguments in (["ls"], ["show", "--values"], ["verify"]):
        command(*arguments, str(good))
    (folder / "secret-told").write_text("\n".join(Echo.told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
