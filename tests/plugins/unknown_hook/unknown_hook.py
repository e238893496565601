from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(name="half", opener="x:y", summary="declared beside a misspelt hook", schemes=("half",))


@hookimpl
def tdstore_bakends():
    return []
