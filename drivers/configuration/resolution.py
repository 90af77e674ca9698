"""Resolution of driver options. The first of these sources that sets an option wins:

1. the URI's query: ``s3://bucket/run?retries=3``
2. a keyword: ``holdfast.save(uri, state, storage_options={"retries": 3})``
3. the environment: ``HOLDFAST_S3_RETRIES``, then, for options common to all schemes,
   ``HOLDFAST_RETRIES``
4. ``holdfast.toml``: the tables of the chosen profile, then those outside profiles
   (:mod:`.file`)
5. ``tuned.toml``: the profile of the place, measured by ``holdfast bench --tune``
   (:mod:`.tuned`)
6. the option's default

An unknown option is an error from any source, and the error names the source. The exception is an
unknown environment variable that is no near miss of a known one: it may belong to another program,
so it is only logged, once. Sources are read whenever a driver is opened; nothing is cached. A
secret may come from anywhere except the URI, which is printed, logged and kept in shell histories.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import UriError
from ..options import Option
from ..uri import WHERE_SECRETS_GO, Uri, has_password, is_secret
from .file import PROFILE_OPTION, Setting, file_settings, text_of
from .tuned import tuned_settings

__all__ = ["PREFIX", "Resolved", "Setting", "resolve"]

PREFIX = "HOLDFAST_"
_PROFILE_VARIABLE = "HOLDFAST_CONFIG_PROFILE"
_OTHERS = ("config", "config_profile", "keeper_dir", "saver")
"""Lower-case names of variables that are not options."""
_NOT_OPTIONS = re.compile(rf"HOLDFAST_({'|'.join(_OTHERS).upper()}|TEST_.*)")
_NEAR = 0.85
"""Minimum similarity (difflib ratio) for one name to count as a misspelling of another."""

_log = logging.getLogger(__name__)
_ignored: set[str] = set()
"""Variables already mentioned in a warning."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """One resolved option. ``text`` is the value as given; None for a default. Value and text may
    be secret, so ``repr()`` hides both."""

    value: Any = field(repr=False)
    text: str | None = field(repr=False)
    source: str


def resolve(
    uri: Uri,
    keywords: Mapping[str, object],
    own: Mapping[str, Option],
    common: Mapping[str, Option],
    schemes: Callable[[], Collection[str]],
    *,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Resolved]:
    """Return the value and source of every option in ``own`` (the driver's) and ``common`` (every
    scheme's).

    ``schemes`` returns all schemes; it is called only for names that match no option of this one.
    Raises UriError for an unknown option, an invalid value, a value with a password before a host,
    and a secret in the URI. Raises UsageError for an unusable ``holdfast.toml`` or ``tuned.toml``.
    """
    if environment is None:
        environment = os.environ
    _refuse_secrets(uri)
    settings = {name: Setting(text, "the URI") for name, text in uri.options.items()}
    settings = {
        name: Setting(text_of(v, name), "a keyword")
        for name, v in keywords.items()
        if v is not None
    } | settings
    settings = _environment_settings(uri, environment, own, common, schemes) | settings
    profile = settings.pop(PROFILE_OPTION, None)
    settings = file_settings(uri, profile, environment, tuple(common), schemes) | settings
    known = {**common, **own}
    settings = tuned_settings(uri, settings, environment, tuple(known)) | settings
    for name, setting in settings.items():
        if name not in known:
            raise _unknown(uri, name, setting.source, own, common)
    return {
        name: _resolved(uri, name, option, settings.get(name)) for name, option in known.items()
    }


def _refuse_secrets(uri: Uri) -> None:
    for name in uri.options:
        if is_secret(name):
            raise UriError(
                f"option {name!r} looks like a secret, which must not be in a URI",
                uri=uri.redacted,
                advice=WHERE_SECRETS_GO,
            )


def _environment_settings(
    uri: Uri,
    environment: Mapping[str, str],
    own: Mapping[str, Option],
    common: Mapping[str, Option],
    schemes: Callable[[], Collection[str]],
) -> dict[str, Setting]:
    for_all: dict[str, Setting] = {}
    for_scheme: dict[str, Setting] = {}
    if environment.get(_PROFILE_VARIABLE):
        for_all[PROFILE_OPTION] = Setting(environment[_PROFILE_VARIABLE], _PROFILE_VARIABLE)
    prefix = _as_variable(uri.scheme)
    for variable in environment:
        if (
            not variable.startswith(PREFIX)
            or _NOT_OPTIONS.fullmatch(variable)
            or not (text := environment[variable])
        ):
            continue
        name = variable.removeprefix(PREFIX).lower()
        option = name.removeprefix(prefix)
        if name in common:
            for_all[name] = Setting(text, variable)
        elif name.startswith(prefix) and (option in own or option in common):
            for_scheme[option] = Setting(text, variable)
        else:
            owner = max(
                (s for s in {uri.scheme, *schemes()} if name.startswith(_as_variable(s))),
                key=len,
                default="",
            )
            if owner in ("", uri.scheme):  # options of another scheme are not checked here
                _judge(uri, variable, own, common)
    return for_all | for_scheme


def _judge(
    uri: Uri, variable: str, own: Mapping[str, Option], common: Mapping[str, Option]
) -> None:
    """Raise UriError if an unknown variable looks like a misspelling of a known one. Otherwise log
    a warning, once: platforms set variables too, such as Kubernetes for a service named
    holdfast."""
    import difflib  # imported here because most users have no such variable

    prefix = _as_variable(uri.scheme)
    known = [*common, *_OTHERS, *(f"{prefix}{name}" for name in (*own, *common))]
    name = variable.removeprefix(PREFIX).lower()
    near = difflib.get_close_matches(name, known, 1, _NEAR)
    if near and near[0].startswith(prefix):
        raise _unknown(uri, name.removeprefix(prefix), variable, own, common)
    advice = (
        f"Options of every scheme: {_listed(common, PREFIX)}; of one scheme: "
        f"{PREFIX}<SCHEME>_<OPTION>."
    )
    text = f"the environment variable {variable} is unknown"
    if near:
        raise UriError(text, advice=f"Did you mean {PREFIX}{near[0].upper()}? {advice}")
    if variable not in _ignored:
        _ignored.add(variable)
        _log.warning("%s, and is ignored. %s", text, advice)


def _as_variable(scheme: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", scheme) + "_"


def _resolved(uri: Uri, name: str, option: Option, setting: Setting | None) -> Resolved:
    if setting is None:
        return Resolved(option.default, None, "default")
    try:
        if has_password(setting.text):
            raise ValueError("must not contain a password")
        return Resolved(option.parse(setting.text), setting.text, setting.source)
    except ValueError as error:
        source = _set_by(setting.source, ",")
        raise UriError(f"option {name!r}{source} {error}", uri=uri.redacted) from error


def _set_by(source: str, comma: str = "") -> str:
    """Return a clause that names the source of an option; "" for the URI, which is shown."""
    if source == "the URI":
        return ""
    return f", which {source} sets{comma}"


def _unknown(
    uri: Uri, name: str, source: str, own: Mapping[str, Option], common: Mapping[str, Option]
) -> UriError:
    return UriError(
        f"{uri.scheme}:// has no option {name!r}{_set_by(source)}",
        uri=uri.redacted,
        advice=(
            f"Known options: {_listed(own)}; for every scheme: "
            f"{_listed((*common, PROFILE_OPTION))}."
        ),
    )


def _listed(names: Iterable[str], prefix: str = "") -> str:
    return (
        ", ".join(prefix + (name.upper() if prefix else name) for name in sorted(names)) or "none"
    )
