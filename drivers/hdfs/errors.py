"""Translation of hdfs-native's errors into Holdfast's errors.

Most failures differ only in their text: ``RuntimeError('RPCError("java.class", "message\\n\\tat
stack…")')``. A Rust panic is a BaseException.
"""

from __future__ import annotations

import re

from ...errors import (
    AccessError,
    BusyError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

_KINDS: dict[type[StorageError], tuple[str, ...]] = {
    NotFoundError: (
        "FileNotFoundException", "PathNotFoundException", "FileNotFound", "IsADirectoryError",
    ),
    ExistsError: ("FileAlreadyExistsException", "AlreadyExists"),
    AccessError: (
        "AccessControlException", "AuthorizationException", "InvalidToken", "SaslException",
        "SASLError", "GSSAPIError", "NoSASLMechanism", "SnapshotAccessControlException",
    ),
    FullError: (
        "QuotaExceededException", "DSQuotaExceededException", "NSQuotaExceededException",
        "QuotaByStorageTypeExceededException", "MaxDirectoryItemsExceededException",
    ),
    BusyError: ("SafeModeException", "RetriableException", "RpcNoSuchMethodException"),
    StorageDownError: (
        "StandbyException", "ObserverRetryOnActiveException", "IOError", "DataTransferError",
        "ChecksumError", "OperationFailed", "BlocksNotFound", "FatalRPCError", "InternalError",
        "NotReplicatedYetException", "ConnectException", "RemoteException",
        "ServerTooBusyException", "InvalidRPCResponse",
    ),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}

_ADVICE: dict[type[StorageError], str] = {
    AccessError: (
        "The user is that of the process, of HADOOP_USER_NAME, or of the Kerberos "
        "ticket; look at owner and mode."
    ),
    FullError: (
        "Raise the quota, free space on the DataNodes (hdfs dfsadmin -report), or keep "
        "fewer checkpoints."
    ),
    BusyError: "The name node is in safe mode or overloaded; see hdfs dfsadmin -safemode get.",
    StorageDownError: "Look at the name node and the DataNodes: hdfs dfsadmin -report. "
    "A DataNode whose disk is full closes connections as if it had died.",
}

_TICKET_ADVICE = (
    "There is no valid Kerberos ticket: run kinit, or kinit -k -t KEYTAB PRINCIPAL; klist shows "
    "what there is. "
    "Without tickets, HADOOP_TOKEN_FILE_LOCATION names a file of delegation tokens, which "
    "expire too."
)

_LEASE_ADVICE = (
    "Another client, or an earlier attempt of this one, writes the file; the name node "
    "ends that after a minute."
)

_SIGNS: tuple[tuple[str, type[StorageError] | None, str | None], ...] = (
    # In the text of an error: its kind, if the class does not tell, and its advice. The first wins.
    # addBlock reports the first two as a plain IOException.
    ("could only be written to 0 of", FullError, None),
    ("could only be replicated to 0", FullError, None),
    ("Insufficient blocks succeeded", StorageDownError, None),
    (
        "Cannot contact any KDC",
        StorageDownError,
        "Is the KDC up, and does KRB5_CONFIG, else /etc/krb5.conf, name it?",
    ),
    # hdfs-native reports these three as "already exists", but they concern a file being written,
    # not a key.
    ("this file lease is currently owned by", BusyError, _LEASE_ADVICE),
    ("is already the current lease holder", BusyError, _LEASE_ADVICE),
    ("lease recovery is in progress", BusyError, _LEASE_ADVICE),
    (
        "does not have any open files",
        StorageError,
        "Somebody deleted the unfinished file, or the name node took it back from a client that "
        "was silent for too long. Save again.",
    ),
    (
        "StandbyException",
        None,
        "This name node is a standby: name the name service in the URI, or all its nodes in "
        "?namenodes=.",
    ),
    ("GSSAPIError", None, _TICKET_ADVICE),
    ("SASL mechanism", None, _TICKET_ADVICE),
    ("InvalidToken", None, _TICKET_ADVICE),
    (
        "RPC listener disconnected",
        None,
        "The name node ended the connection: it died, or turns this client away; its log tells. Is "
        "hadoop.security.authentication in core-site.xml the same here and there?",
    ),
)

_PARENT_IS_A_FILE = ("ParentNotDirectoryException", "(is not a directory)")

_JAVA_CLASS = re.compile(r"\b(?:\w+\.){2,}(?:\w+\$)?(\w*(?:Exception|InvalidToken))\b")
_GSSAPI_WORDS = re.compile(r'GSSAPIError\(.*\d+, "([^"]*)"\)', re.DOTALL)
_RUST_KIND = re.compile(r"([A-Z]\w+)\(")


def storage_error(error: BaseException, doing: str, uri: str, key: str) -> StorageError:
    """Return the StorageError for ``error``; the caller raises it from ``error``. ``doing`` starts
    the message."""
    text = str(error)
    kind = _kind(error, text)
    if any(sign in text for sign in _PARENT_IS_A_FILE):
        kind = StorageError if doing in ("create", "rename") else NotFoundError
        return kind(
            f"{doing} failed: a part of the key names a file; nothing lies below it",
            uri=uri,
            key=key,
        )
    message = f"{doing} failed: {_first_line(text) or type(error).__name__}"
    stated = (advice for sign, _, advice in _SIGNS if advice and sign in text)
    advice = next(stated, _ADVICE.get(kind))
    return kind(message, uri=uri, key=key, advice=advice)


def _kind(error: BaseException, text: str) -> type[StorageError]:
    for sign, kind, _ in _SIGNS:
        if kind and sign in text:
            return kind
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return NotFoundError
    if isinstance(error, FileExistsError):
        return ExistsError
    if isinstance(error, PermissionError):
        return AccessError
    names = [*_JAVA_CLASS.findall(text), *_RUST_KIND.findall(text)]
    known = [_KIND_OF[name] for name in names if name in _KIND_OF]
    if known:
        return known[0]
    if isinstance(error, OSError | TimeoutError):
        return StorageDownError
    return StorageError


def _first_line(text: str) -> str:
    """Return the message without the Java stack, on one line; for Kerberos errors only the GSSAPI
    text."""
    words = _GSSAPI_WORDS.search(text)
    if words is not None:
        return f"Kerberos: {words[1]}"
    return re.split(r"\\n|\n", text, maxsplit=1)[0].strip().rstrip('"')[:500]
