from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(name="twin", opener="first_twin:open_it", summary="declared twice", schemes=("twin",))
    yield Backend(name="firstonly", opener="first_twin:open_it", summary="declared once", schemes=("firstonly",))
