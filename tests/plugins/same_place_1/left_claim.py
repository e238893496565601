from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(
        name="left", opener="left_claim:open_it", summary="shares its place", schemes=("place",), suffixes=(".place",)
    )
