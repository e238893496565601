from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(name="dotless", opener="dotless:open_it", summary="a suffix without its dot", suffixes=("sqlite",))
