from tdstore.hookspecs import Backend, hookimpl


@hookimpl
def tdstore_backends():
    yield Backend(name="twin", opener="second_twin:open_it", summary="declared twice", schemes=("twin",))
    yield Backend(name="secondonly", opener="second_twin:open_it", summary="declared once", schemes=("secondonly",))
