"""What a body is said to be, judged before it is read: JSON, in UTF-8, not compressed.

A web page may send a foreign server plain text, a form or bytes of no type without asking it first; JSON only after a preflight. So a page
cannot make a server without keys work for it: its bodies of other types are refused, and of no type too, since browsers name the origin.
Programs that name no type are served. `curl -d` names a form: it has to say `-H 'Content-Type: application/json'`.
"""

from collections.abc import Iterable

from relay.errors import UnsupportedMediaType

_UTF8 = ("utf-8", "utf8", "us-ascii")


def check_json(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises UnsupportedMediaType."""
    found = {name: value.decode("latin-1").strip().lower() for name, value in headers}
    for coding in (part.strip() for part in found.get(b"content-encoding", "").split(",")):
        if coding not in ("", "identity"):
            raise UnsupportedMediaType(f"the body's Content-Encoding is `{coding[:32]}`; send it as it is, without one")
    media_type, _, parameters = found.get(b"content-type", "").partition(";")
    media_type = media_type.strip()
    if not media_type and b"origin" not in found:
        return
    if media_type != "application/json" and not (media_type.startswith("application/") and media_type.endswith("+json")):
        what = f"the body's Content-Type is `{media_type[:64]}`" if media_type else "the body has no Content-Type"
        raise UnsupportedMediaType(f"{what}; send JSON, with `Content-Type: application/json`")
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in _UTF8:
            raise UnsupportedMediaType(f"the body's charset is `{value[:32]}`; JSON is sent as UTF-8")
