from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(name="never", opener="x:y", summary="the next line raises")
    raise ZeroDivisionError("while listing backends")


@hookimpl
def tdstore_guess_backend(location):
    raise LookupError("while guessing")


@hookimpl
def tdstore_store_opened(store):
    raise OSError("while looking at a store")
