"""What an answer of an object store means: an outcome, a line for people, and whether asking again helps."""

from __future__ import annotations

import os
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from kvbm_core.errors import Outcome

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_CLOCK = "the clock of this machine is wrong; let NTP set it"
_KEYS = "the credentials are wrong; see docs/remote.md for where they come from"
_EXPIRED = (
    "the credentials have expired; a role renews them by itself, keys in the environment need a restart"
)
_RIGHTS = "the credentials do not allow it; docs/remote.md lists the rights that it takes"
_BUCKET = "there is no such bucket; make it, or correct its name"
_REGION = "it is in another region or at another address; set AWS_REGION or AWS_ENDPOINT_URL_S3"
_BY_CODE = {
    "RequestTimeTooSkewed": _CLOCK,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "InvalidToken": _KEYS,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "NoSuchBucket": _BUCKET,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
}
"""What no second try mends, by S3's error code."""
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
_ARCHIVED = "InvalidObjectState"
_TIMED_OUT = re.compile(r"TimedOut|operation timed out")
_WHENCE = "see docs/remote.md for where they come from"
_NO_KEYS = f"there is no way to get credentials; {_WHENCE}"
_TRANSPORT = (
    (
        re.compile(r"InvalidCertificate|invalid peer certificate"),
        "its certificate is not trusted here; name a file with its authority in AWS_CA_BUNDLE",
    ),
    (re.compile(r"redirect without LOCATION"), f"it answers with a redirect: {_REGION}"),
    (
        re.compile(r"/latest/(?:api/token|meta-data)|metadata\.google|169\.254\."),
        f"there are no credentials; {_WHENCE}",
    ),
    (re.compile(r"[Cc]redential"), _NO_KEYS),
)
"""What no second try mends, by words in obstore's error."""
_CONNECTION = (
    (re.compile(r"POST REDACTED|token file"), _NO_KEYS),
    (re.compile(r"dns error|failed to lookup"), "its host name does not resolve"),
    (re.compile(r"ConnectionRefused|Connection refused"), "nobody listens at its address"),
    (re.compile(r"Connect\b|connect error"), "there is no way to its address"),
)
_TRIED_PORT = re.compile(r'"tcp connect error",\s+\S+:(\d+),')
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
_AGAIN = {408, 429, 500, 502, 503, 504}
_OFF = {401: _KEYS, 403: _RIGHTS, 301: _REGION, 302: _REGION, 307: _REGION, 308: _REGION}


class Trouble(NamedTuple):
    """``why``: for the log, made of our own words, a status and S3's error code, never of other text of the
    answer. Empty for a MISS and for a time-out, which the caller logs. ``kind``: trouble of one kind is
    logged once.

    ``is_off``: a person has to mend it, so the store is left alone for a while. ``may_pass``: a second try
    may succeed.
    """

    outcome: Outcome
    kind: str = ""
    why: str = ""
    is_off: bool = False
    may_pass: bool = False


def judge(error: BaseException, *, was_late: bool) -> Trouble:
    """What an exception of obstore means. ``was_late``: the request's own time was over.

    obstore's classes do not tell time-outs, missing buckets and wrong clocks apart; its text does. None of
    that text is handed on: it repeats what the server sent, with keys and tokens.
    """
    text = str(error)
    status, code = answer_in(error)
    if "POST REDACTED" in text or not (status or isinstance(error, FileNotFoundError)):
        return _judge_transport(text, was_late=was_late)  # REDACTED: obstore's word for a service of tokens
    if (status in (0, 404) and code != "NoSuchBucket") or code == _ARCHIVED:
        return Trouble(Outcome.MISS)
    said = " ".join(filter(None, (str(status), code)))
    if status == 507 or code in _FULL:
        return Trouble(Outcome.NO_SPACE, "full", f"{said}: make room, or raise the quota")
    if remedy := _BY_CODE.get(code) or _OFF.get(status):
        kind = code if code in _BY_CODE else str(status)
        return Trouble(Outcome.IO_ERROR, kind, f"{said}: {remedy}", is_off=True)
    is_passing = status in _AGAIN or code == "RequestTimeout"
    return Trouble(Outcome.IO_ERROR, str(status), f"its answer is {said}", may_pass=is_passing)


def answer_in(error: BaseException) -> tuple[int, str]:
    """The status of a server's answer, and S3's error code in it. 0 and "" if there is none; an answer to
    HEAD has no code.
    """
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    return int(status[1]) if status else 0, code[1] if code else ""


def _judge_transport(text: str, *, was_late: bool) -> Trouble:
    """What an exception means that holds no answer of the server."""
    for pattern, why in _TRANSPORT:
        if pattern.search(text):
            return Trouble(Outcome.IO_ERROR, why, why, is_off=True)
    if was_late or _TIMED_OUT.search(text):
        return Trouble(Outcome.TIMED_OUT)
    why = next((why for pattern, why in _CONNECTION if pattern.search(text)), "it broke off its answer")
    if proxy := _proxy_at(text):
        why = f"nobody listens at the proxy that {proxy} names"
    return Trouble(Outcome.IO_ERROR, why, why, may_pass=True)


def _proxy_at(text: str) -> str:
    """The variable that names the proxy to which no connection was made; empty if it was to the store."""
    tried = _TRIED_PORT.search(text)
    for name in _PROXIES if tried is not None else ():
        url = os.environ.get(name) or os.environ.get(name.lower()) or ""
        try:
            port = urlsplit(url if "://" in url else f"http://{url}").port
        except ValueError:
            continue
        if url and tried is not None and str(port) == tried[1]:
            return name
    return ""


def is_beyond_the_end(error: BaseException) -> bool:
    """Whether a part was wanted that begins where the object has ended."""
    return answer_in(error)[0] == 416
