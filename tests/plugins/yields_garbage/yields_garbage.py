from tdstore.hookspecs import hookimpl


@hookimpl
def tdstore_backends():
    return ["not a backend"]


@hookimpl
def tdstore_codecs():
    return [42]


@hookimpl
def tdstore_guess_backend(location):
    return 42 if "garbage" in location else None
