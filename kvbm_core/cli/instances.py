"""Where the commands that look at running instances find them, and what their metrics pages say."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvbm_core.cli.report import shown
from kvbm_core.cli.status import Samples, StatusError, parse_samples
from kvbm_core.config import KvbmSettings
from kvbm_core.control.listed import InstanceRecord, ask_http, is_proven, listed
from kvbm_core.control.messages import Answer, Order, Result, Verb
from kvbm_core.control.pages import EVERY_ADDRESS, Page, pages
from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from kvbm_core.control.asking import Asked

MAX_PAGE_BYTES = 4 << 20
READ_BYTES = 64 << 10
MAX_READ_AT_ONCE = 16
DEFAULT_PORT = 6880
UNREADABLE = "cannot read"
REMEDY = "start the engine with DYN_KVBM_METRICS=true, or name its page (http://HOST:6880)"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}", re.ASCII)
"""As a record in etcd may have it."""
# Never by a proxy: a page is on this machine, or in the same network.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Reading:
    """One instance's numbers at one moment; ``trouble``: why there are none. ``where``: its page, or the wire
    that told them. ``is_listed``: etcd says that it is there.
    """

    name: str
    where: str
    samples: Samples = field(default_factory=dict)
    trouble: str = ""
    is_listed: bool = False
    read_at_s: float = field(default_factory=time.monotonic)

    @property
    def about(self) -> dict[str, str]:
        """The labels of kvbm_info; empty if the page has none."""
        found = self.samples.get("kvbm_info")
        return {label: shown(value) for label, value in found[0][0].items()} if found else {}

    @property
    def title(self) -> str:
        """The instance's name, engine and model, as far as they are known."""
        about = self.about
        parts = (shown(self.name), about.get("engine", ""), about.get("model", ""), self.where)
        return ", ".join(dict.fromkeys(filter(None, parts)))


@dataclass(frozen=True)
class Sought:
    """Whom to look at: ``urls`` of pages; or with an operator's ``key`` all of its fleet, over NATS; else all
    of this user on this machine, and with ETCD_ENDPOINTS whom etcd lists elsewhere. ``instance``: only the
    one of this name.
    """

    urls: tuple[str, ...] = ()
    key: Path | None = None
    instance: str = ""
    timeout_s: float = 3.0

    def read(self) -> list[Reading]:
        """All of them, by name; those that do not answer have trouble to tell. StatusError, one line, if
        nobody is there, and what the settings raise if they cannot be used.
        """
        if self.urls:
            found = _fetch_all([(url, page_url(url)) for url in self.urls], self.timeout_s)
        else:
            found = self._of_fleet(self.key) if self.key is not None else self._here()
        chosen = [one for one in found if self.instance in ("", one.name, one.name.rpartition(".")[0])]
        if not chosen and self.instance:
            names = ", ".join(sorted(one.name for one in found))
            raise StatusError(f"--instance {self.instance} is not there; there are: {names or 'none'}")
        return sorted(chosen, key=lambda one: one.name)

    def _of_fleet(self, key: Path) -> list[Reading]:
        from kvbm_core.control.asking import ask_fleet  # asyncio and more: not for who has no key
        from kvbm_core.control.operators import OperatorKey

        settings = KvbmSettings.from_env(None)
        order = Order(verb=Verb.METRICS, fleet=settings.fleet, wait_s=self.timeout_s)
        found = _told(ask_fleet(settings, OperatorKey(key.expanduser()), order), "NATS")
        if not found:
            raise StatusError("nobody answers over NATS: are engines started with KVBM_CONTROL=nats?")
        return found

    def _here(self) -> list[Reading]:
        from kvbm_core.control.asking import ask_here

        noted = pages()
        found = _fetch_all([(page.name, _url_of(page)) for page in noted], self.timeout_s)
        names = {page.name for page in noted}
        asked = ask_here(Order(verb=Verb.METRICS, wait_s=self.timeout_s))
        found += [one for one in _told(asked, "socket") if one.name not in names]
        settings = KvbmSettings.from_env(None)
        names = {one.name for one in found}
        try:
            records = {name: of for name, of in (listed(settings) or {}).items() if name not in names}
        except ConfigError as error:  # who is here is shown all the same
            return [*(found or self._as_set()), Reading("etcd", "etcd", trouble=str(error))]
        return [*found, *Elsewhere(settings, self.timeout_s).read(records)] or self._as_set()

    def _as_set(self) -> list[Reading]:
        """Nobody has said where it is; whoever serves where the shell's settings say is asked."""
        settings = KvbmSettings.from_env(None)
        page = Page(host=settings.metrics_host, port=settings.metrics_port, about={})
        (one,) = _fetch_all([(page.address(), _url_of(page))], self.timeout_s)
        if one.trouble:
            raise StatusError(f"{one.trouble}, and no engine of this user is there: {REMEDY}")
        return [one]


class Elsewhere:
    """Instances that etcd lists, on other machines as a rule. By its metrics page; without one that can be
    reached from here by an order over HTTP, with the token of KVBM_CONTROL_TOKEN_FILE.
    """

    def __init__(self, settings: KvbmSettings, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._order = Order(verb=Verb.METRICS, fleet=settings.fleet, wait_s=timeout_s)

    def read(self, records: Mapping[str, InstanceRecord | None]) -> list[Reading]:
        """Each of them; those that cannot be asked say why."""
        with ThreadPoolExecutor(MAX_READ_AT_ONCE) as pool:
            return list(pool.map(self._read, records, records.values()))

    def _read(self, name: str, record: InstanceRecord | None) -> Reading:
        if record is None:
            return Reading(name, "etcd", trouble="its record in etcd cannot be read", is_listed=True)
        one = self._of(name, record)
        who = ", ".join(filter(None, (record.engine, record.model)))
        where = f"{shown(who)} on {shown(record.host)}"
        trouble = f"{where}: {one.trouble}" if one.trouble else ""
        return replace(one, name=name, trouble=trouble, is_listed=True)

    def _of(self, name: str, record: InstanceRecord) -> Reading:
        page = None
        if _ADDRESS.fullmatch(record.page):
            page = _fetch(name, f"http://{record.page}/metrics", self._timeout_s)
            if not page.trouble or not record.address:
                return page
        if _ADDRESS.fullmatch(record.address):
            return self._ask(name, record)
        if "nats" in record.ways:
            return Reading(name, "etcd", trouble="it takes orders over NATS alone: ask with --key FILE")
        return Reading(name, "etcd", trouble="its page and its orders are reached from its own machine alone")

    def _ask(self, name: str, record: InstanceRecord) -> Reading:
        from kvbm_core.control.http_wire import TOKEN_FILE, read_token

        where = f"http://{record.address}"
        if not self._settings.control_token_file:
            return Reading(name, where, trouble=f"set {TOKEN_FILE}: {where} answers who has its token")
        try:
            token = read_token(self._settings)
        except ConfigError as error:
            return Reading(name, where, trouble=str(error))
        if not is_proven(record, token, self._settings.fleet):
            trouble = f"the token of {TOKEN_FILE} is not that of {where}; it is not sent there"
            return Reading(name, where, trouble=trouble)
        answer = ask_http(record.address, token, self._order, self._timeout_s)
        if isinstance(answer, str):
            return Reading(name, where, trouble=f"{UNREADABLE} {where} ({shown(answer)})")
        return _answered(answer, where)


def page_url(text: str) -> str:
    """The page that ``text`` means: a port, a host, a host and port, or a URL. StatusError if it is none."""
    whole = f"127.0.0.1:{text}" if text.isdigit() else text
    if not _SCHEME.match(whole):
        whole = f"http://{whole}"
    try:
        url = urlsplit(whole)
        is_url = bool(url.hostname) and url.scheme in {"http", "https"} and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise StatusError(f"{shown(text)} is no metrics page: write http://HOST:PORT")
    port = "" if url.port or url.scheme == "https" else f":{DEFAULT_PORT}"
    path = "/metrics" if url.path in {"", "/"} else url.path
    return f"{url.scheme}://{url.netloc}{port}{path}"


def _url_of(page: Page) -> str:
    own = "[::1]" if page.host == "::" else "127.0.0.1"
    return f"http://{page.address(own) if page.host in EVERY_ADDRESS else page.address()}/metrics"


def _fetch_all(wanted: Iterable[tuple[str, str]], timeout_s: float) -> list[Reading]:
    with ThreadPoolExecutor(MAX_READ_AT_ONCE) as pool:
        return list(pool.map(lambda one: _fetch(one[0], one[1], timeout_s), wanted))


def _read(answer: HTTPResponse, until_s: float) -> bytes:
    """OSError for who says little and slowly: an operator looks at others meanwhile."""
    parts, left_bytes = list[bytes](), MAX_PAGE_BYTES
    while left_bytes > 0 and (part := answer.read1(min(left_bytes, READ_BYTES))):
        if time.monotonic() > until_s:
            raise TimeoutError("it says too little in this time")
        parts.append(part)
        left_bytes -= len(part)
    return b"".join(parts)


def _fetch(name: str, url: str, timeout_s: float) -> Reading:
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            page = _read(answer, time.monotonic() + timeout_s).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return Reading(name, url, trouble=f"{UNREADABLE} {url} ({shown(reason)})")
    return _reading(name, url, page)


def _reading(name: str, where: str, page: str) -> Reading:
    try:
        samples = parse_samples(page)
    except StatusError as error:
        return Reading(name, where, trouble=f"{where}: {error}")
    if not any(of.startswith("kvbm_") for of in samples):
        return Reading(name, where, trouble=f"{where} is not kvbm's")
    one = Reading(name, where, samples)
    about = one.about
    return replace(one, name=f"{about.get('name', '')}.{about.get('rank', '')}") if about else one


def _told(asked: Asked, wire: str) -> list[Reading]:
    missing = [Reading(name, wire, trouble="does not answer") for name in asked.missing]
    return missing + [_answered(one, wire) for one in asked.answers]


def _answered(answer: Answer, wire: str) -> Reading:
    name = f"{answer.instance}.{answer.rank}"
    if answer.result is Result.REFUSED:
        return Reading(name, wire, trouble=f"{shown(name)} refuses: {shown(answer.text)}")
    return _reading(name, wire, answer.page)
