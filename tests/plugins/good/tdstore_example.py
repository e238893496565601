"""An example plugin, whole: `example://name` keeps tensors in files of numpy's own format, in a folder."""

from __future__ import annotations

from collections.abc import Iterable

from tdstore.hookspecs import Backend, Codec, hookimpl

OPENED: list[str] = []


class Celsius:
    """A value that is not a tensor, for the codec."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


@hookimpl
def tdstore_backends() -> Iterable[Backend]:
    yield Backend(
        name="example",
        opener="tdstore_example_store:open_example",
        summary="an example: tensors of this process, by name",
        schemes=("example", "exampled"),
        suffixes=(".example",),
        markers=("example.marker",),
        magic=(b"EXAMPLE1",),
        install="pip install tdstore-example",
    )
    yield Backend(
        name="needy",
        opener="tdstore_example_needy:open_needy",
        summary="needs a package",
        install="pip install needed-thing",
    )
    yield Backend(name="lost", opener="tdstore_example_store:open_nothing", summary="names an opener that is not there")
    yield Backend(name="odd", opener="tdstore_example_store:open_odd", summary="returns what is no store")


@hookimpl
def tdstore_guess_backend(location: str) -> str | None:
    return "example" if "guess-me" in location else None


@hookimpl
def tdstore_codecs() -> Iterable[Codec]:
    yield Codec(name="celsius", kind=Celsius, encode=lambda v: v.degrees, decode=Celsius)


@hookimpl
def tdstore_store_opened(store: object) -> None:
    OPENED.append(getattr(store, "url", "?"))
